"""The network: shapes, sizes, initial numbers, and its whole forward pass against plain NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kgo_shard import convert
from kgo_shard.augment import expand
from kgo_shard.batches import read_packed_batches
from kgo_shard.config import MODEL_SIZES, Config
from kgo_shard.diff import limits
from kgo_shard.model import Linear, RMSNorm, init_net, make_tables, rotate
from kgo_shard.state import learned_shapes

SMALL = Config(pos_len=9, model_kind="b2c32", compute_dtype="float32")


@pytest.fixture(scope="module")
def net():
    return init_net(jax.random.PRNGKey(7), SMALL.model, SMALL.precision, 0.02)


@pytest.fixture(scope="module")
def tables():
    return make_tables(SMALL.model)


def shapes_of(config, rows=3):
    """Output shapes and dtypes, without computing anything."""
    net = learned_shapes(config).net
    tables, edge = make_tables(config.model), config.pos_len
    return jax.eval_shape(net.__class__.__call__, net, jnp.zeros((rows, 22, edge, edge)), jnp.zeros((rows, 19)), tables)


@pytest.mark.parametrize("pos_len", [9, 19])
def test_outputs_have_the_heads_shapes_in_float32(pos_len):
    outputs = shapes_of(SMALL.replace(pos_len=pos_len))
    area = pos_len * pos_len
    assert {name: value.shape for name, value in outputs._asdict().items()} == {
        "policy": (3, 6, area + 1),
        "value": (3, 3),
        "misc": (3, 10),
        "more_misc": (3, 8),
        "ownership": (3, 1, pos_len, pos_len),
        "scoring": (3, 1, pos_len, pos_len),
        "future": (3, 2, pos_len, pos_len),
        "seki": (3, 4, pos_len, pos_len),
        "score_belief": (3, 2 * (area + 60)),
    }
    assert {value.dtype for value in outputs} == {jnp.dtype("float32")}


@pytest.mark.parametrize("options", [{"compute_dtype": "bfloat16"}, {"activation_dtype": "bfloat16"}, {"param_dtype": "bfloat16"}])
def test_heads_are_float32_whatever_the_trunk_is(options):
    assert {value.dtype for value in shapes_of(SMALL.replace(**options))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("kind", ["b2c32", "b12c192", "b24c2048"])
def test_the_number_of_parameters_is_the_formulas(kind):
    layers, channels, _, ffn = MODEL_SIZES[kind]
    buckets = 2 * (361 + 60)
    stem = channels * 22 * 9 + channels * 19
    block = 4 * channels**2 + 3 * channels * ffn + 2 * channels
    heads = 2 * (6 * channels + 6) + 29 * channels + 29 + buckets * channels + buckets
    leaves = jax.tree.leaves(learned_shapes(Config(model_kind=kind)).net)
    assert sum(leaf.size for leaf in leaves) == stem + layers * block + channels + heads


def test_initial_weights_come_from_one_split_in_the_originals_order(net):
    layers = 2
    keys = iter(jax.random.split(jax.random.PRNGKey(7), 6 + 7 * layers))
    std, residual = 0.02, 0.02 / math.sqrt(2 * layers)
    expected = {}

    def draw(name, shape, std=std):
        expected[name] = jax.random.normal(next(keys), shape, jnp.float32) * std

    draw("conv_spatial/w", (32, 22, 3, 3))
    draw("linear_global/w", (32, 19))
    for i in range(layers):
        draw(f"blocks/{i}/out_proj/w", (32, 32), residual)
        draw(f"blocks/{i}/ffn_w2/w", (32, 64), residual)
        for name, rows in (("q_proj", 32), ("k_proj", 32), ("v_proj", 32), ("ffn_w1", 64), ("ffn_wgate", 64)):
            draw(f"blocks/{i}/{name}/w", (rows, 32))
    draw("policy_head/linear_board/w", (6, 32))
    draw("policy_head/linear_pass/w", (6, 32))
    draw("value_head/linear_sv/w", (29, 32))
    draw("value_head/linear_s_simple/w", (282, 32))
    assert next(keys, None) is None
    named = convert.to_named(net)
    for name, value in expected.items():
        assert np.asarray(named[name]).tobytes() == np.asarray(value).tobytes(), name
    assert named.keys() - expected.keys() == {
        *(f"blocks/{i}/norm{n}/weight" for i in range(layers) for n in (1, 2)),
        "norm_final/weight",
        *(f"{head}/b" for head in ("policy_head/linear_board", "policy_head/linear_pass", "value_head/linear_sv", "value_head/linear_s_simple")),
    }


def test_initial_weights_have_their_spread_biases_are_zero_and_norms_one(net):
    for name, leaf in convert.to_named(net).items():
        leaf = np.asarray(leaf)
        assert leaf.dtype == np.float32
        if name.endswith("/b"):
            assert not leaf.any(), name
        elif name.endswith("/weight"):
            assert (leaf == 1).all(), name
        else:
            std = 0.02 / 2 if "out_proj" in name or "ffn_w2" in name else 0.02
            # Five standard deviations of the mean and of the spread of so many normal draws.
            assert abs(leaf.mean()) < 5 * std / math.sqrt(leaf.size), name
            assert abs(leaf.std() / std - 1) < 5 / math.sqrt(2 * leaf.size), name


def test_init_std_and_param_dtype_reach_every_weight(net):
    precision = SMALL.replace(param_dtype="bfloat16").precision
    half = init_net(jax.random.PRNGKey(7), SMALL.model, precision, 0.01)
    for (name, leaf), whole in zip(convert.to_named(half).items(), convert.to_named(net).values(), strict=True):
        assert leaf.dtype == jnp.bfloat16
        # Halving is exact, then the rounding to bfloat16.
        scale = 0.5 if name.endswith("/w") else 1
        np.testing.assert_array_equal(leaf, (whole * scale).astype(jnp.bfloat16), err_msg=name)


def test_channels_of_the_value_head_are_in_the_originals_order(net):
    named = {name: np.zeros_like(leaf) for name, leaf in convert.to_named(net).items()}
    named["value_head/linear_sv/b"] = np.arange(29, dtype=np.float32)
    named["policy_head/linear_board/b"] = np.arange(6, dtype=np.float32)
    named["policy_head/linear_pass/b"] = 10 + np.arange(6, dtype=np.float32)
    outputs = jax.jit(lambda net, x: net.heads(x))(convert.from_named(net, named), jnp.ones((1, 81, 32)))
    boards = {name: getattr(outputs, name)[0].reshape(-1, 81) for name in ("ownership", "scoring", "future", "seki")}
    assert all((board == board[:, :1]).all() for board in boards.values())
    assert {name: board[:, 0].tolist() for name, board in boards.items()} == {
        "ownership": [0],
        "scoring": [1],
        "future": [2, 3],
        "seki": [4, 5, 6, 7],
    }
    np.testing.assert_array_equal(outputs.value[0], np.arange(8, 11))
    np.testing.assert_array_equal(outputs.misc[0], np.arange(11, 21))
    np.testing.assert_array_equal(outputs.more_misc[0], np.arange(21, 29))
    np.testing.assert_array_equal(outputs.policy[0, :, :81], np.repeat(np.arange(6)[:, None], 81, axis=1))
    np.testing.assert_array_equal(outputs.policy[0, :, 81], 10 + np.arange(6))


# Tables and rotary embedding


def test_tables_are_host_constants_with_the_specifications_angles(tables):
    # Head size 16: half of it holds 4 frequencies for the row, then the same 4 for the column.
    frequencies = 100.0 ** (-np.arange(0, 8, 2) / 8)
    row, column = np.divmod(np.arange(81), 9)
    angles = np.concatenate([row[:, None] * frequencies, column[:, None] * frequencies], axis=1)
    assert all(type(table) is np.ndarray and table.dtype == np.float32 for table in tables)
    # The power is an exp of a product of size log(100), whose relative error is some units of that; 16 in all, of the angle.
    limit = limits.summation_limit(16, 1, np.dtype(np.float32)) * np.maximum(1, angles)
    assert (np.abs(tables.cos - np.cos(angles)) <= limit).all() and (np.abs(tables.sin - np.sin(angles)) <= limit).all()
    np.testing.assert_array_equal(tables.score_offsets, np.arange(282) - 141 + 0.5)
    assert tables.score_offsets[0] == -tables.score_offsets[-1] == -140.5


def test_rotation_turns_pairs_of_halves(tables):
    x = np.random.default_rng(0).standard_normal((1, 81, 2, 16)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), tables, jnp.float32))
    pairs = x[..., :8] + 1j * x[..., 8:]
    expected = pairs * (tables.cos + 1j * tables.sin)[None, :, None, :]
    limit = limits.summation_limit(3, 2, np.dtype(np.float32)) * np.abs(pairs)  # two products and a sum
    assert (np.abs(turned[..., :8] - expected.real) <= limit).all() and (np.abs(turned[..., 8:] - expected.imag) <= limit).all()
    np.testing.assert_array_equal(turned[0, 0], x[0, 0])  # the first point has angle zero


def test_products_of_rotated_vectors_depend_on_the_difference_of_the_points_alone(tables):
    rand = np.random.default_rng(1)
    q, k = (np.broadcast_to(rand.standard_normal(16).astype(np.float32), (1, 81, 1, 16)) for _ in "qk")
    q, k = (np.asarray(rotate(jnp.asarray(x), tables, jnp.float32), np.float64)[0, :, 0] for x in (q, k))
    products = (q @ k.T).reshape(9, 9, 9, 9)
    # Angles of up to 16 have errors of 16 units, and there are 16 products of numbers of size up to 3.
    limit = limits.summation_limit(16 * 16 + 16, float((np.abs(q).max(0) * np.abs(k).max(0)).sum()), np.dtype(np.float32))
    for i in range(9):
        for j in range(9):
            moved = products[i:, j:][:, :, i:, j:]
            assert np.abs(moved - products[: 9 - i, : 9 - j, : 9 - i, : 9 - j]).max() <= limit
    # Not trivially: other differences give other products, and rows are not columns.
    assert np.abs(products[0, 0] - products[0, 0].T).max() > 100 * limit and np.ptp(products[0, 0]) > 100 * limit


# Parts


def test_a_linear_rounds_its_product_to_the_compute_dtype_and_adds_the_bias_in_float32():
    precision = Config(compute_dtype="bfloat16").precision
    x, weight, bias = jnp.array([[1.0, 2.0**-9]], jnp.float32), jnp.ones((1, 2)), jnp.array([2.0**-9])
    plain = Linear(weight, None, precision)(x, jnp.float32)
    assert plain.dtype == jnp.float32 and plain[0, 0] == 1  # 1 + 2^-9 has no bfloat16
    assert Linear(weight, bias, precision)(x, jnp.float32)[0, 0] == 1 + 2.0**-9
    assert Linear(weight, bias, precision)(x, jnp.bfloat16)[0, 0] == 1
    assert Linear(weight, None, Config(compute_dtype="float32").precision)(x, jnp.float32)[0, 0] == 1 + 2.0**-9


def test_a_norm_computes_in_float32_and_has_its_epsilon_inside_the_root():
    x = jnp.array([[3e-4, -4e-4, 0.0, 0.0]], jnp.float32)
    expected = np.array([3e-4, -4e-4, 0, 0]) / math.sqrt(25e-8 / 4 + 1e-6) * 2
    got = np.asarray(RMSNorm(jnp.full(4, 2.0))(x), np.float64)[0]
    np.testing.assert_allclose(got, expected, rtol=limits.summation_limit(12, 1, np.dtype(np.float32)))
    low = RMSNorm(jnp.full(4, 2.0))(x.astype(jnp.bfloat16))
    assert low.dtype == jnp.bfloat16


def products_in(jaxpr):
    """(primitive, operand dtypes, output dtype) of every matrix product and convolution, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield eqn.primitive.name, {str(var.aval.dtype) for var in eqn.invars}, str(eqn.outvars[0].aval.dtype)
        for value in eqn.params.values():
            if hasattr(value, "jaxpr"):
                yield from products_in(value.jaxpr)


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_every_product_is_made_in_the_compute_dtype(net, tables, compute):
    config = SMALL.replace(compute_dtype=compute)
    net = init_net(jax.random.PRNGKey(0), config.model, config.precision, 0.02)
    made = jax.make_jaxpr(lambda x, g: net(x, g, tables))(jnp.zeros((2, 22, 9, 9)), jnp.zeros((2, 19)))
    products = list(products_in(made.jaxpr))
    # Stem: convolution and linear; a block: 7 linears and 2 products of attention; heads: 4 linears.
    assert len(products) == 2 + 2 * 9 + 4
    assert {(operands, out) for _, dtypes, out in products for operands in dtypes} == {(compute, compute)}


# The whole forward pass


def reference_forward(p, planes, global_inputs, layers, heads, dtype):
    """The specification's section 2 in NumPy, every operation in `dtype`; `p` by original names."""
    p = {name: np.asarray(leaf, dtype) for name, leaf in p.items()}
    planes, global_inputs = planes.astype(dtype), global_inputs.astype(dtype)
    n, _, edge, _ = planes.shape
    area = edge * edge
    padded = np.pad(planes, ((0, 0), (0, 0), (1, 1), (1, 1)))
    x = 0
    for di in range(3):
        for dj in range(3):
            window = padded[:, :, di : di + edge, dj : dj + edge].reshape(n, 22, area).swapaxes(1, 2)
            x = x + window @ p["conv_spatial/w"][:, :, di, dj].T
    x = x + (global_inputs @ p["linear_global/w"].T)[:, None]
    channels = x.shape[-1]
    size = channels // heads
    frequencies = 1 / 100 ** (np.arange(0, size // 2, 2).astype(dtype) / (size // 2))
    row, column = np.divmod(np.arange(area).astype(dtype), dtype(edge))
    angles = np.concatenate([row[:, None] * frequencies, column[:, None] * frequencies], axis=1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rms(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + dtype(1e-6)) * weight

    def turn(x):
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    for i in range(layers):
        w = {name: p[f"blocks/{i}/{name}"] for name in (
            "norm1/weight", "norm2/weight", "q_proj/w", "k_proj/w", "v_proj/w", "out_proj/w", "ffn_w1/w", "ffn_wgate/w", "ffn_w2/w"
        )}  # fmt: skip
        y = rms(x, w["norm1/weight"])
        q, k, v = ((y @ w[f"{name}_proj/w"].T).reshape(n, area, heads, size) for name in "qkv")
        q, k, v = (part.transpose(0, 2, 1, 3) for part in (turn(q), turn(k), v))
        logits = q @ k.swapaxes(-1, -2) / dtype(math.sqrt(size))
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(n, area, channels) @ w["out_proj/w"].T
        y = rms(x, w["norm2/weight"])
        up = y @ w["ffn_w1/w"].T
        x = x + (up / (1 + np.exp(-up)) * (y @ w["ffn_wgate/w"].T)) @ w["ffn_w2/w"].T
    x = rms(x, p["norm_final/weight"])
    mean = x.mean(1)
    linear = lambda x, name: x @ p[f"{name}/w"].T + p[f"{name}/b"]  # noqa: E731
    board, passing = linear(x, "policy_head/linear_board"), linear(mean, "policy_head/linear_pass")
    channels = linear(x, "value_head/linear_sv").swapaxes(1, 2)
    spatial, other = channels[:, :8].reshape(n, 8, edge, edge), channels[:, 8:].mean(-1)
    score = linear(mean, "value_head/linear_s_simple")
    score = score - score.max(-1, keepdims=True)
    return {
        "policy": np.concatenate([board.swapaxes(1, 2), passing[:, :, None]], axis=-1),
        "value": other[:, :3],
        "misc": other[:, 3:13],
        "more_misc": other[:, 13:],
        "ownership": spatial[:, :1],
        "scoring": spatial[:, 1:2],
        "future": spatial[:, 2:4],
        "seki": spatial[:, 4:],
        "score_belief": score - np.log(np.exp(score).sum(-1, keepdims=True)),
    }


def arranged(named, config):
    """The leaves of a list of unfused blocks in the layout of `config`."""
    parts = [{name.removeprefix(f"blocks/{i}/"): leaf for name, leaf in named.items() if name.startswith(f"blocks/{i}/")} for i in (0, 1)]
    if config.fused:
        for part in parts:
            part["qkv_proj/w"] = np.concatenate([part.pop(f"{name}_proj/w") for name in "qkv"])
            part["ffn_upgate/w"] = np.concatenate([part.pop("ffn_w1/w"), part.pop("ffn_wgate/w")])
    if config.stacked:
        blocks = {f"blocks/{name}": np.stack([part[name] for part in parts]) for name in parts[0]}
    else:
        blocks = {f"blocks/{i}/{name}": leaf for i, part in enumerate(parts) for name, leaf in part.items()}
    return {name: leaf for name, leaf in named.items() if not name.startswith("blocks/")} | blocks


VARIANTS = [
    {},
    {"attention_impl": "xla"},
    {"fuse_projections": True, "remat_blocks": True},
    {"stack_blocks": True},
    {"scan_blocks": True, "fuse_projections": True, "remat_blocks": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "+".join(variant) or "plain")
def test_the_forward_pass_is_the_specifications(net, tables, rows9, variant):
    config = SMALL.replace(batch_size=8, symmetry_type="none")
    rows = expand(next(read_packed_batches(sorted((rows9 / "train").glob("*.npz")), config, 1)), 9)
    planes, global_inputs = np.asarray(rows["binaryInputNCHW"]), np.asarray(rows["globalInputNC"])
    # Large weights everywhere, norms and biases too: attention is sharp, and no part can be left out unnoticed.
    rand = np.random.default_rng(2)
    named = {
        name: (rand.standard_normal(leaf.shape) * (2 * leaf.shape[-1] ** -0.5 if name.endswith("/w") else 0.5) + offset).astype(np.float32)
        for name, leaf in convert.to_named(net).items()
        for offset in [name.endswith("/weight")]
    }
    config = SMALL.replace(**variant)
    other = convert.from_named(learned_shapes(config).net, arranged(named, config.model))
    outputs = jax.jit(lambda net, x, g: net(x, g, tables))(other, planes, global_inputs)
    exact = reference_forward(named, planes, global_inputs, 2, 2, np.float64)
    rounded = reference_forward(named, planes, global_inputs, 2, 2, np.float32)
    for name, value in outputs._asdict().items():
        assert rounded[name].dtype == np.float32 and value.shape == exact[name].shape
        error, numpy_error = (limits.norm(x - exact[name]) for x in (np.asarray(value, np.float64), rounded[name]))
        # The three-way bound: our float32 may be as far from the exact result as NumPy's, times two.
        assert error <= limits.limit_for(numpy_error), (name, error, numpy_error)
        assert numpy_error < 1e-4 * limits.norm(exact[name]), "the bound would not see a wrong term"
