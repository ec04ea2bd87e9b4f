"""Schedule, clipping, AdamW, SGD and the moving average, to the original's last bit where it has one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kgo_shard import convert, optim
from kgo_shard.config import Config, ModelConfig
from kgo_shard.diff import limits
from kgo_shard.model import init_net
from kgo_shard.optim import Schedule

FLOAT = np.dtype(np.float32)
CONFIG = Config(compute_dtype="float32")
PRECISION = CONFIG.precision
TINY = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, ffn_dim=12, pos_len=3)

DECAYED = {
    "conv_spatial/w",
    "linear_global/w",
    "blocks/0/q_proj/w",
    "blocks/0/k_proj/w",
    "blocks/0/v_proj/w",
    "blocks/0/out_proj/w",
    "blocks/0/ffn_w1/w",
    "blocks/0/ffn_wgate/w",
    "blocks/0/ffn_w2/w",
    "policy_head/linear_board/w",
    "policy_head/linear_pass/w",
    "value_head/linear_sv/w",
    "value_head/linear_s_simple/w",
}
NOT_DECAYED = {
    "blocks/0/norm1/weight",
    "blocks/0/norm2/weight",
    "norm_final/weight",
    "policy_head/linear_board/b",
    "policy_head/linear_pass/b",
    "value_head/linear_sv/b",
    "value_head/linear_s_simple/b",
}


@pytest.fixture(scope="module")
def net():
    return init_net(jax.random.PRNGKey(0), TINY, PRECISION, 0.02)


def random_like(net, seed, scale=1.0, dtype=np.float32):
    rand = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(scale * rand.standard_normal(leaf.shape), dtype), net)


def schedule_of(count, rate=0.0, decay=0.0):
    return Schedule(*(jnp.float32(x) for x in (count, rate, decay)))


def named(tree):
    return {name: np.asarray(leaf) for name, leaf in convert.to_named(tree).items()}


# Schedule


def test_warm_up_and_cosine_have_the_originals_count():
    config = Config(lr=1.0, batch_size=16, warmup_samples=4 * 16, max_training_samples=12 * 16)
    rates = [optim.learning_rate(config, step) for step in range(6)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 0.9619], atol=5e-5)
    assert rates[5] == 0.5 * (1 + np.cos(np.pi / 8))
    # A run that is resumed after 3 steps goes on where it was.
    resumed = optim.make_schedule(config, 3, 3)
    np.testing.assert_array_equal(resumed.learning_rate, np.array(rates[3:], np.float32))
    np.testing.assert_array_equal(resumed.count, [4, 5, 6])


def test_the_cosine_ends_at_zero_and_warm_up_is_at_least_a_step():
    config = Config(lr=3.0, batch_size=16, warmup_samples=15, max_training_samples=11 * 16)
    assert [optim.learning_rate(config, step) for step in (0, 1)] == [3.0, 3.0]
    assert optim.learning_rate(config, 6) == pytest.approx(1.5, rel=1e-15) and optim.learning_rate(config, 11) == 0
    assert optim.learning_rate(config.replace(max_training_samples=1), 1) == 3.0  # total and its distance are at least 1


def test_a_constant_rate_has_no_warm_up():
    config = Config(lr=0.5, lr_schedule="constant")
    assert {optim.learning_rate(config, step) for step in (0, 1, 1000, 10**6)} == {0.5}


def test_a_schedule_is_float32_and_counts_from_one():
    schedule = optim.make_schedule(Config(wd=0.3), 0, 4)
    assert {leaf.dtype for leaf in schedule} == {jnp.dtype("float32")} and {leaf.shape for leaf in schedule} == {(4,)}
    assert all(isinstance(leaf, np.ndarray) for leaf in schedule), "a Python number would be weakly typed, and compile the step twice"
    np.testing.assert_array_equal(schedule.count, [1, 2, 3, 4])
    np.testing.assert_array_equal(schedule.weight_decay, np.full(4, np.float32(0.3)))


# Clipping


@pytest.mark.parametrize(
    ("gradient", "max_norm", "clipped"),
    [
        ((3.0, 4.0), 0.01, (0.006, 0.008)),
        ((3e-5, 4e-5), 1e-5, (5.882e-6, 7.843e-6)),  # Optax's rule, without an epsilon, gives 6.0e-6 and 8.0e-6
        ((0.0, 0.0), 1e-5, (0.0, 0.0)),
    ],
)
def test_clip_has_the_originals_epsilon(gradient, max_norm, clipped):
    g = np.array(gradient, np.float32)
    norm = np.sqrt(np.sum(g * g))
    got = np.asarray(optim.clip({"w": jnp.asarray(g)}, jnp.float32(norm), max_norm)["w"])
    np.testing.assert_allclose(got, clipped, rtol=1e-4)
    exact = np.array(gradient) * np.minimum(1, max_norm / (np.linalg.norm(gradient) + 1e-6))
    np.testing.assert_allclose(got, exact, rtol=limits.summation_limit(8, 1, FLOAT))
    assert got.dtype == np.float32
    theirs = optax.clip_by_global_norm(max_norm)
    moved = np.asarray(theirs.update({"w": jnp.asarray(g)}, theirs.init(None))[0]["w"])
    if gradient[0] == 3e-5:
        assert abs(moved[0] / got[0] - 1) > 0.01, "Optax's clip would pass this test too"


def test_a_gradient_within_the_limit_is_left_alone():
    g = np.array([0.3, 0.4], np.float32)
    assert np.asarray(optim.clip({"w": jnp.asarray(g)}, jnp.float32(0.5), 0.51)["w"]).tobytes() == g.tobytes()
    low = optim.clip({"w": jnp.asarray(g, jnp.bfloat16)}, jnp.float32(0.5), 0.1)["w"]
    assert low.dtype == jnp.bfloat16


def test_the_norm_is_that_of_all_leaves_in_float32(net):
    assert optim.global_norm(jax.tree.map(jnp.zeros_like, net)) == 0
    gradients = random_like(net, 1)
    leaves = [leaf.astype(np.float64) for leaf in named(gradients).values()]
    exact = np.sqrt(sum((leaf**2).sum() for leaf in leaves))
    norm = optim.global_norm(gradients)
    assert norm.dtype == jnp.float32
    # Squares, their sum in any order, the root, which halves the error.
    size = sum(leaf.size for leaf in leaves)
    assert abs(float(norm) - exact) <= limits.summation_limit(size + 3, exact, FLOAT)
    low = optim.global_norm(jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients))
    assert low.dtype == jnp.float32 and abs(float(low) / exact - 1) < 2**-8


# Decay


def test_decayed_leaves_are_the_originals_by_name(net):
    labels = convert.to_named(optim.decay_labels(net))
    print("\n".join(f"{'decay' if label else '  -  '}  {name}" for name, label in labels.items()))
    assert {name for name, label in labels.items() if label is True} == DECAYED
    assert {name for name, label in labels.items() if label is False} == NOT_DECAYED


def test_with_zero_gradients_only_decayed_leaves_move_and_by_exactly_their_decay(net):
    ones = jax.tree.map(jnp.ones_like, net)
    optimizer = optim.make_optimizer(Config())
    direction, _ = optimizer.update(jax.tree.map(jnp.zeros_like, net), optimizer.init(ones), ones, count=jnp.float32(1))
    moved = named(optim.apply_direction(ones, direction, schedule_of(1, 0.1, 0.5), CONFIG))
    assert {name for name, leaf in moved.items() if (leaf == np.float32(0.95)).all()} == DECAYED
    assert {name for name, leaf in moved.items() if (leaf == 1).all()} == NOT_DECAYED


def test_a_parameter_moves_in_the_originals_order_of_operations(net):
    params, direction = random_like(net, 2), random_like(net, 3)
    rate, decay = np.float32(0.3), np.float32(0.7)
    got, other = named(optim.apply_direction(params, direction, schedule_of(1, rate, decay), CONFIG)), 0
    for name, p in named(params).items():
        d = named(direction)[name]
        expected = p - rate * d
        if name in DECAYED:
            expected = expected - rate * decay * p
            other += (expected != p - (rate * d + rate * decay * p)).sum()
        assert got[name].tobytes() == expected.tobytes(), name
    assert other > 0, "the other order gives the same bits: this test would not tell them apart"


# AdamW


def test_one_minus_beta_is_taken_in_float32():
    adam = optim.scale_by_adam(PRECISION)
    one = {"w": jnp.ones(3)}
    _, state = adam.update(one, adam.init(one), count=jnp.float32(1))
    f = np.float32
    assert (np.asarray(state.m["w"]) == f(1) - f(0.9)).all() and f(1) - f(0.9) != f(0.1)
    assert (np.asarray(state.v["w"]) == f(1) - f(0.95)).all() and f(1) - f(0.95) != f(0.05)


def test_three_steps_are_adamw_in_float64_to_rounding(net):
    optimizer = optim.make_optimizer(Config())
    params, state = net, optimizer.init(net)
    exact = {name: leaf.astype(np.float64) for name, leaf in named(net).items()}
    m, v = ({name: np.zeros_like(leaf) for name, leaf in exact.items()} for _ in "mv")
    beta1, beta2 = np.float64(np.float32(0.9)), np.float64(np.float32(0.95))
    rate, decay = np.float64(np.float32(2e-3)), np.float64(np.float32(0.1))
    for t in (1, 2, 3):
        gradients = random_like(net, 10 + t, scale=10.0 ** (t - 4))
        direction, state = optimizer.update(gradients, state, params, count=jnp.float32(t))
        params = optim.apply_direction(params, direction, schedule_of(t, rate, decay), CONFIG)
        for name, g in named(gradients).items():
            g = g.astype(np.float64)
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            step = (m[name] / (1 - beta1**t)) / (np.sqrt(v[name] / (1 - beta2**t)) + 1e-8)
            exact[name] = exact[name] - rate * step - (rate * decay * exact[name] if name in DECAYED else 0)
            # A handful of roundings of each operation, and of the powers of beta before 1 is taken off: that is 1/0.05 of them.
            limit = limits.summation_limit(3 * (32 + 8 * 20), 1, FLOAT)
            got_m, got_v, got = named(state.m)[name], named(state.v)[name], named(params)[name]
            assert np.abs(got_m - m[name]).max() <= limit * np.abs(m[name]).max(), (t, name)
            assert np.abs(got_v - v[name]).max() <= limit * np.abs(v[name]).max(), (t, name)
            # The step's denominator makes a parameter's error a part of the learning rate.
            assert np.abs(got - exact[name]).max() <= limit * (np.abs(exact[name]).max() + 3 * rate), (t, name)
    # The betas, the epsilon's place and the bias correction all show far above that limit: Adam's first step is lr * sign(g).
    assert limit * (1 + 3 * rate) < 0.05 * rate


def test_the_first_step_is_the_learning_rate_whatever_the_gradients_size():
    adam = optim.scale_by_adam(PRECISION)
    for size in (1e-6, 1.0, 1e6):
        gradient = {"w": jnp.array([size, -size], jnp.float32)}
        direction, _ = adam.update(gradient, adam.init(gradient), count=jnp.float32(1))
        # The epsilon of 1e-8 is 1 % of a gradient of 1e-6.
        np.testing.assert_allclose(direction["w"], np.array([1, -1]) / (1 + 1e-8 / size), rtol=1e-5)


def test_moments_are_zeros_of_the_state_dtype_in_buffers_of_their_own(net):
    precision = Config(opt_state_dtype="bfloat16").precision
    state = optim.scale_by_adam(precision).init(net)
    leaves = jax.tree.leaves(state)
    assert len(leaves) == 2 * len(jax.tree.leaves(net))
    assert all(leaf.dtype == jnp.bfloat16 and not leaf.any() for leaf in leaves)
    # One buffer for two leaves could not be donated.
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("options", [{}, {"opt_state_dtype": "bfloat16"}, {"opt_update_dtype": "bfloat16"}, {"param_dtype": "bfloat16"}])
def test_structure_and_dtypes_survive_an_update(net, options):
    config = Config(compute_dtype="float32", **options)
    precision = config.precision
    params = jax.tree.map(lambda p: p.astype(precision.param), net)
    optimizer = optim.make_optimizer(config)
    state = optimizer.init(params)

    def one(params, state, gradients):
        direction, state = optimizer.update(gradients, state, params, count=jnp.float32(1))
        return optim.apply_direction(params, direction, schedule_of(1, 0.1, 0.1), config), state

    new_params, new_state = jax.eval_shape(one, params, state, params)
    for old, new in ((params, new_params), (state, new_state)):
        assert jax.tree.structure(old) == jax.tree.structure(new)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(old)] == [(x.shape, x.dtype) for x in jax.tree.leaves(new)]


# SGD and none


@pytest.mark.parametrize("optimizer", ["sgd", "none"])
def test_without_moments_a_step_is_the_gradients_and_keeps_what_a_checkpoint_had(net, optimizer):
    config = CONFIG.replace(optimizer=optimizer)
    params, gradients = random_like(net, 4), random_like(net, 5)
    saved = optim.Moments(random_like(net, 6), random_like(net, 7))  # a file may hold moments that are not zero
    direction, state = optim.make_optimizer(config).update(gradients, saved, params, count=jnp.float32(3))
    rate, decay = np.float32(0.3), np.float32(0.7)
    moved = named(optim.apply_direction(params, direction, schedule_of(3, rate, decay), config))
    for name, p in named(params).items():
        expected = p
        if optimizer == "sgd":  # (p - lr g) - (lr wd) p
            expected = p - rate * named(gradients)[name]
            expected = expected - (rate * decay) * p if name in DECAYED else expected
        assert moved[name].tobytes() == expected.tobytes(), name
    for old, new in zip(jax.tree.leaves(saved), jax.tree.leaves(state), strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


# Moving average


def test_the_moving_average_takes_one_minus_decay_in_double():
    f, decay = np.float32, 0.99
    rand = np.random.default_rng(4)
    e, p = (rand.standard_normal(1000).astype(f) for _ in "ep")
    got = np.asarray(optim.update_ema({"w": jnp.asarray(e)}, {"w": jnp.asarray(p)}, decay)["w"])
    assert got.tobytes() == (f(decay) * e + f(1 - decay) * p).tobytes()
    assert (got != f(decay) * e + (f(1) - f(decay)) * p).any()


def test_the_moving_average_is_float32_also_of_bfloat16_parameters():
    ema = optim.update_ema({"w": jnp.ones(2)}, {"w": jnp.zeros(2, jnp.bfloat16)}, 0.9)["w"]
    assert ema.dtype == jnp.float32 and (np.asarray(ema) == np.float32(0.9)).all()
