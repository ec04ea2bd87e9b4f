"""Muon: which leaves it takes, how it cuts them up, and what its iteration does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kgo_shard import convert, muon, optim
from kgo_shard.config import Config, ModelConfig
from kgo_shard.diff.limits import limit_for, norm
from kgo_shard.model import init_net, unstack

SIZES = dict(num_layers=2, hidden_size=16, num_heads=2, ffn_dim=24, pos_len=3)
LAYOUTS = {
    "list": {},
    "fused": {"fused": True},
    "stacked": {"stacked": True},
    "stacked and fused": {"stacked": True, "fused": True},
}
OTHER_DECAYED = {"conv_spatial/w", "linear_global/w", "policy_head/linear_board/w", "policy_head/linear_pass/w"}
OTHER_DECAYED |= {"value_head/linear_s_simple/w", "value_head/linear_sv/w"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "out_proj"}
FFN = {"ffn_w1", "ffn_wgate", "ffn_w2", "ffn_upgate"}
TARGETS = {"all": ATTENTION | FFN, "attn": ATTENTION, "ffn": FFN, "square": {"q_proj", "k_proj", "v_proj", "out_proj"}, "none": set()}


def make_net(layout: str):
    return init_net(jax.random.PRNGKey(0), ModelConfig(**SIZES, **LAYOUTS[layout]), Config(compute_dtype="float32").precision, 0.02)


def make_config(**options) -> Config:
    """A run of b2c32, whose heads have 16 rows."""
    return Config(optimizer="muon", model_kind="b2c32", compute_dtype="float32", **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", TARGETS)
def test_labels_of_every_leaf(layout, target):
    """The original's rules, told from its names: decay on `w` outside of norms, Muon on `w` of blocks, heads for q, k and v."""
    net = make_net(layout)
    rules = convert.to_named(optim.rule_labels(net, make_config(muon_target=target)))
    decays = convert.to_named(optim.decay_labels(net))
    assert len(rules) == len(decays) == len(jax.tree.leaves(net))
    print(f"\n{layout} blocks, --muon-target {target}")
    for name in rules:
        print(f"  {name:32} {'decayed' if decays[name] else '':8} {rules[name]}")
        words = name.split("/")
        in_block = words[0] == "blocks" and words[-1] == "w"
        if in_block and words[-2] in TARGETS[target]:
            expected = muon.BY_HEADS if words[-2] in {"q_proj", "k_proj", "v_proj", "qkv_proj"} else muon.BY_ROWS
        else:
            expected = optim.ADAM
        assert rules[name] == expected, name
        assert decays[name] == (in_block or name in OTHER_DECAYED), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "none"])
def test_without_muon_all_leaves_have_one_label(optimizer):
    labels = jax.tree.leaves(optim.rule_labels(make_net("list"), Config(optimizer=optimizer)))
    assert set(labels) == {{"adamw": optim.ADAM, "sgd": optim.SGD, "none": optim.NONE}[optimizer]}


@pytest.mark.parametrize(
    ("shape", "cut", "row_split", "expected"),
    [
        ((32, 32), muon.BY_HEADS, 0, (2, 16, 32)),  # b2c32 has heads of 16 rows
        ((32, 32), muon.BY_HEADS, 8, (2, 16, 32)),  # never by rows
        ((96, 32), muon.BY_HEADS, 0, (6, 16, 32)),  # q, k and v in one matrix: each third by its heads
        ((2, 96, 32), muon.BY_HEADS, 0, (2, 6, 16, 32)),
        ((64, 32), muon.BY_ROWS, 0, (64, 32)),
        ((64, 32), muon.BY_ROWS, 16, (4, 16, 32)),
        ((64, 32), muon.BY_ROWS, 64, (64, 32)),  # not taller
        ((64, 32), muon.BY_ROWS, 24, (64, 32)),  # does not divide
        ((2, 64, 32), muon.BY_ROWS, 16, (2, 4, 16, 32)),
    ],
)
def test_how_a_leaf_is_cut(shape, cut, row_split, expected):
    m = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    pieces = muon.split(m, cut, make_config(muon_row_split_size=row_split))
    assert pieces.shape == expected
    assert np.array_equal(pieces.reshape(shape), m)  # contiguous rows


def polar_in_float64(x: np.ndarray, steps: int) -> np.ndarray:
    """The polynomials on the singular values."""
    u, s, vt = np.linalg.svd(x / (1.02 * np.linalg.norm(x) + 1e-6), full_matrices=False)
    for a, b, c in muon.COEFFICIENTS[:steps]:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vt


def polar_in_bfloat16(x: np.ndarray, steps: int) -> np.ndarray:
    """The matrix form in NumPy, every result rounded to bfloat16."""

    def low(y):
        return y.astype(ml_dtypes.bfloat16).astype(np.float32)

    wide = low(x.astype(np.float32)) if x.shape[0] <= x.shape[1] else low(x.astype(np.float32)).T
    y = low(wide / (1.02 * np.linalg.norm(wide) + 1e-6))
    for a, b, c in muon.COEFFICIENTS[:steps]:
        a, b, c = (low(np.float32(number)) for number in (a, b, c))
        gram = low(y @ y.T)
        y = low(low(a * y) + low(low(low(b * gram) + low(c * low(gram @ gram))) @ y))
    return y if x.shape[0] <= x.shape[1] else y.T


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (24, 24)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_the_iteration_is_the_polynomial_on_the_singular_values(shape, steps):
    """The three-way bound: as near to float64 as the same iteration in NumPy; one step more or less is not."""
    x = np.asarray(np.random.default_rng(steps).normal(size=shape), ml_dtypes.bfloat16).astype(np.float64)
    got = np.asarray(muon.orthogonalize(jnp.asarray(x, jnp.float32), steps), np.float64)
    exact = polar_in_float64(x, steps)
    limit = limit_for(norm(polar_in_bfloat16(x, steps) - exact))
    assert norm(got - exact) <= limit
    for other in {steps - 1, steps + 1} & {1, 2, 3}:  # later steps move nothing any more
        assert norm(got - polar_in_float64(x, other)) > limit


def test_matrices_of_a_stack_do_not_meet():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16, 32)), jnp.float32)
    together = muon.orthogonalize(x, 3)
    assert all(np.array_equal(together[i], muon.orthogonalize(x[i], 3)) for i in range(3))


def test_the_momentum_is_a_sum_and_the_update_is_scaled():
    """Two updates of one block by hand: m = 0.95 m + g, orthogonalised, times sqrt of the longer side; p (1 - lr wd) - 0.2 lr u."""
    config = make_config(muon_target="ffn", muon_polar_steps=3)
    net = init_net(jax.random.PRNGKey(0), config.model, config.precision, 0.02)
    optimizer = optim.make_optimizer(config)
    rng = np.random.default_rng(0)
    gradients = [jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), net) for _ in range(2)]
    state, params = optimizer.init(net), net
    schedule = optim.Schedule(*(jnp.float32(x) for x in (1, 0.01, 0.1)))
    for gradient in gradients:
        direction, state = optimizer.update(gradient, state, params, count=jnp.float32(1))
        params = optim.apply_direction(params, direction, schedule, config)
    f = np.float32
    p, m = np.asarray(net.blocks[0].ffn.down.weight), f(0)
    for gradient in gradients:
        m = f(0.95) * m + np.asarray(gradient.blocks[0].ffn.down.weight)
        u = np.asarray(muon.orthogonalize(jnp.stack([m, m]), 3)[0] * jnp.bfloat16(8), f)  # sqrt(64)
        p = p * (f(1) - f(0.01) * f(0.1)) - (f(0.2) * f(0.01)) * u
    name = "blocks/0/ffn_w2/w"
    assert np.asarray(convert.to_named(state.m)[name]).tobytes() == m.tobytes()
    assert np.asarray(convert.to_named(params)[name]).tobytes() == p.tobytes()
    assert convert.to_named(state.v)[name].shape == () and convert.to_named(state.v)["blocks/0/q_proj/w"].shape == (32, 32)


@pytest.mark.parametrize(("fused", "row_split"), [(False, 0), (True, 16)])
def test_grouped_single_and_stacked_matrices_get_the_same_directions(fused, row_split):
    """Whichever way the blocks lie, a matrix goes through the iteration alone: heads, chunks of rows, whole matrices."""
    found = []
    for options in ({"muon_group_blocks": True}, {"muon_group_blocks": False}, {"stack_blocks": True}):
        config = make_config(fuse_projections=fused, muon_row_split_size=row_split, **options)
        net = init_net(jax.random.PRNGKey(0), config.model, config.precision, 0.02)
        optimizer = optim.make_optimizer(config)
        blocks = optimizer.update(net, optimizer.init(net), net, count=jnp.float32(1))[0].blocks
        found.append(jax.tree.leaves(blocks if isinstance(blocks, tuple) else unstack(blocks, config.model.num_layers)))
    for leaves in zip(*found, strict=True):
        assert len({np.asarray(leaf).tobytes() for leaf in leaves}) == 1
    assert len({np.asarray(leaf).tobytes() for leaf in found[0] if leaf.ndim == 2}) == (8 if fused else 14)  # no two matrices alike
