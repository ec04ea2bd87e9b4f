"""The network as pure functions over nested dicts of arrays (spec, section 2; order of operations, section 8).

Shapes: N rows, P board edge, A = P*P points, C channels, H heads, d = C/H, F ffn, S score buckets.
The order in which an array is used fixes the order in which its cotangents are added, so it is kept as the spec states it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import dtypes_of

RMS_EPS = 1e-6
ROPE_THETA = 100.0
NUM_POLICIES = 6
NUM_SV_SPATIAL = 8  # ownership 1, scoring 1, future position 2, seki 4
NUM_SV = 29  # and value 3, misc 10, more-misc 8
HEADS = ("policy", "value", "misc", "moremisc", "ownership", "scoring", "futurepos", "seki", "scorebelief")


# ------------------------------------------------------------------------------------------------------- initialisation


def init_params(config):
    """Random parameters in param_dtype: normal(0, init_std), projections back into the trunk scaled by 1/sqrt(2L).

    The numbers depend on JAX's partitionable-threefry default (spec, section 2), as the original's do.
    """
    sizes, dtypes = config.model_config, dtypes_of(config)
    layers, width, ffn = sizes["num_layers"], sizes["hidden_size"], sizes["ffn_dim"]
    keys = iter(jax.random.split(jax.random.PRNGKey(config.seed), 6 + layers * (4 if config.fuse_projections else 7)))
    std, std_out = config.init_std, config.init_std / np.sqrt(2.0 * layers).item()

    def normal(shape, scale=std):
        # Drawn in float32 also for the float64 reference: the same numbers, raised exactly.
        return (jax.random.normal(next(keys), shape, np.float32) * np.float32(scale)).astype(dtypes.param)

    def constant(shape, value):
        return jnp.full(shape, value, dtypes.param)

    def block():
        # Key order: out_proj, ffn_w2, q, k, v, w1, wgate; fused: out_proj, ffn_w2, qkv, upgate.
        shapes = {"q_proj": (width, width), "k_proj": (width, width), "v_proj": (width, width),
                  "ffn_w1": (ffn, width), "ffn_wgate": (ffn, width)}
        if config.fuse_projections:
            shapes = {"qkv_proj": (3 * width, width), "ffn_upgate": (2 * ffn, width)}
        return {
            "out_proj": {"w": normal((width, width), std_out)},
            "ffn_w2": {"w": normal((width, ffn), std_out)},
            **{name: {"w": normal(shape)} for name, shape in shapes.items()},
            "norm1": {"weight": constant((width,), 1.0)},
            "norm2": {"weight": constant((width,), 1.0)},
        }

    def stacked(blocks):
        return jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *blocks) if config.stack_blocks else blocks

    def biased(out):
        return {"w": normal((out, width)), "b": constant((out,), 0.0)}

    return {
        "conv_spatial": {"w": normal((width, 22, 3, 3))},
        "linear_global": {"w": normal((width, 19))},
        "blocks": stacked([block() for _ in range(layers)]),
        "norm_final": {"weight": constant((width,), 1.0)},
        "policy_head": {"linear_board": biased(NUM_POLICIES), "linear_pass": biased(NUM_POLICIES)},
        "value_head": {"linear_sv": biased(NUM_SV), "linear_s_simple": biased(config.score_buckets)},
    }


# --------------------------------------------------------------------------------------------------------------- tables


class Tables(NamedTuple):
    """Constants of the step. cos, sin: (A, d/2) in the rope dtype; score_offsets: (S,) in the full dtype."""

    cos: np.ndarray
    sin: np.ndarray
    score_offsets: np.ndarray


def make_tables(config):
    """Computes the tables eagerly with jnp: inside the compiled step, or with NumPy, the cosines differ in the last bit."""
    dtypes, size = dtypes_of(config), config.pos_len
    half = config.model_config["hidden_size"] // config.model_config["num_heads"] // 2
    with jax.ensure_compile_time_eval():
        exponents = jnp.arange(0, half, 2, dtype=dtypes.full) / half
        freqs = 1.0 / (ROPE_THETA ** exponents)
        places = jnp.arange(size, dtype=dtypes.full)
        rows = jnp.repeat(places, size)[:, None] * freqs[None, :]
        columns = jnp.tile(places, size)[:, None] * freqs[None, :]
        angles = jnp.concatenate([rows, columns], axis=-1)
        offsets = jnp.arange(config.score_buckets, dtype=dtypes.full) - (config.board_area + 60) + 0.5
        cos, sin = jnp.cos(angles).astype(dtypes.rope), jnp.sin(angles).astype(dtypes.rope)
    return Tables(np.asarray(cos), np.asarray(sin), np.asarray(offsets))


# --------------------------------------------------------------------------------------------------------------- layers


def matmul(x, w, dtypes):
    """x (..., in) times w (out, in) transposed, both cast to COMPUTE after the transpose; the result has COMPUTE dtype."""
    return x.astype(dtypes.compute) @ w.T.astype(dtypes.compute)


def biased_linear(x, layer, dtypes):
    """A head's linear: the product raised to the full dtype, where the bias is added."""
    return matmul(x, layer["w"], dtypes).astype(dtypes.full) + layer["b"].astype(dtypes.full)


def rms_norm(x, weight, dtypes):
    full = x.astype(dtypes.full)
    # x*x, not square(x): the cotangents of the two uses are added in another order.
    scale = jax.lax.rsqrt(jnp.mean(full * full, axis=-1, keepdims=True) + RMS_EPS)
    return (full * scale * weight.astype(dtypes.full)).astype(x.dtype)


def rotate(x, tables, dtypes):
    """Rotate-half embedding of (N,A,H,d)."""
    x = x.astype(dtypes.rope)
    cos, sin = tables.cos[None, :, None, :], tables.sin[None, :, None, :]
    x0, x1 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x0 * cos - x1 * sin, x1 * cos + x0 * sin], axis=-1)


def project(x, block, names, fused, dtypes):
    """The products of x with the matrices `names`, in the activation dtype; from the one matrix `fused` where the block has it."""
    if fused in block:
        return jnp.split(matmul(x, block[fused]["w"], dtypes).astype(dtypes.activation), len(names), axis=-1)
    return [matmul(x, block[name]["w"], dtypes).astype(dtypes.activation) for name in names]


def attention(x, block, tables, config, dtypes):
    """Multi-head attention over the board points, softmax in the logits dtype: (N,A,C) -> (N,A,C)."""
    rows, points, width = x.shape
    heads = config.model_config["num_heads"]
    depth = width // heads

    q, k, v = (part.reshape(rows, points, heads, depth) for part in project(x, block, ("q_proj", "k_proj", "v_proj"), "qkv_proj", dtypes))
    q, k = rotate(q, tables, dtypes), rotate(k, tables, dtypes)
    if config.attention_impl == "xla":
        mixed = jax.nn.dot_product_attention(*(part.astype(dtypes.compute) for part in (q, k, v)))
    else:
        q, k, v = (jnp.transpose(part, (0, 2, 1, 3)).astype(dtypes.compute) for part in (q, k, v))
        logits = (q @ jnp.swapaxes(k, -1, -2)).astype(dtypes.attention_logits) * float(1.0 / np.sqrt(depth))
        weights = jax.nn.softmax(logits, axis=-1).astype(dtypes.compute)
        mixed = jnp.transpose(weights @ v, (0, 2, 1, 3))
    mixed = mixed.reshape(rows, points, width)
    return matmul(mixed, block["out_proj"]["w"], dtypes).astype(dtypes.activation)


def feed_forward(x, block, dtypes):
    """SwiGLU: (N,A,C) -> (N,A,C); silu on the activation dtype, the gate product in the FFN-mul dtype."""
    up, gate = project(x, block, ("ffn_w1", "ffn_wgate"), "ffn_upgate", dtypes)
    up = up * jax.nn.sigmoid(up)
    product = up.astype(dtypes.ffn_mul) * gate.astype(dtypes.ffn_mul)
    return matmul(product, block["ffn_w2"]["w"], dtypes).astype(dtypes.activation)


# --------------------------------------------------------------------------------------------------------------- stages


def stem(params, planes, globals_, dtypes):
    """Planes (N,22,P,P) and globals (N,19) -> (N,A,C) in the activation dtype, row-major over the board."""
    board = jax.lax.conv_general_dilated(planes.astype(dtypes.compute), params["conv_spatial"]["w"].astype(dtypes.compute),
                                         (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    # Cast and sum come before the reshape: what stands side by side decides which roundings to bfloat16 the compiler drops.
    row = matmul(globals_, params["linear_global"]["w"], dtypes).astype(dtypes.activation)
    board = board.astype(dtypes.activation) + row[:, :, None, None]
    rows, width = board.shape[:2]
    return jnp.transpose(board.reshape(rows, width, -1), (0, 2, 1))


def run_block(x, block, tables, config, dtypes):
    x = (x + attention(rms_norm(x, block["norm1"]["weight"], dtypes), block, tables, config, dtypes)).astype(dtypes.activation)
    return (x + feed_forward(rms_norm(x, block["norm2"]["weight"], dtypes), block, dtypes)).astype(dtypes.activation)


def trunk(params, x, tables, config, dtypes):
    """The blocks and the final norm; (N,A,C) -> (N,A,C) in the full dtype, rounded to the activation dtype on the way."""
    run, blocks = functools.partial(run_block, tables=tables, config=config, dtypes=dtypes), params["blocks"]
    if config.remat_blocks:
        run = jax.checkpoint(run)
    if config.scan_blocks:
        x, _ = jax.lax.scan(lambda x, block: (run(x, block), None), x, blocks)
    else:
        if config.stack_blocks:
            blocks = [jax.tree_util.tree_map(lambda leaf: leaf[i], blocks) for i in range(config.model_config["num_layers"])]
        for block in blocks:
            x = run(x, block)
    return rms_norm(x, params["norm_final"]["weight"], dtypes).astype(dtypes.full)


def heads(params, x, config, dtypes):
    """(N,A,C) -> dict of the nine head outputs in the full dtype; see `forward`."""
    policy, value = params["policy_head"], params["value_head"]
    board = jnp.transpose(biased_linear(x, policy["linear_board"], dtypes), (0, 2, 1))
    pooled = jnp.mean(x, axis=1)
    passing = biased_linear(pooled, policy["linear_pass"], dtypes)[:, :, None]
    sv = jnp.transpose(biased_linear(x, value["linear_sv"], dtypes), (0, 2, 1))
    belief = jax.nn.log_softmax(biased_linear(pooled, value["linear_s_simple"], dtypes), axis=-1)
    spatial = sv[:, :NUM_SV_SPATIAL].reshape(sv.shape[0], NUM_SV_SPATIAL, config.pos_len, config.pos_len)
    rest = jnp.mean(sv[:, NUM_SV_SPATIAL:], axis=2)
    return {
        "policy": jnp.concatenate([board, passing], axis=2),
        "value": rest[:, 0:3],
        "misc": rest[:, 3:13],
        "moremisc": rest[:, 13:21],
        "ownership": spatial[:, 0:1],
        "scoring": spatial[:, 1:2],
        "futurepos": spatial[:, 2:4],
        "seki": spatial[:, 4:8],
        "scorebelief": belief,
    }


def forward(params, batch, tables, config):
    """Batch -> policy (N,6,A+1), value (N,3), misc (N,10), moremisc (N,8), ownership and scoring (N,1,P,P), futurepos (N,2,P,P),
    seki (N,4,P,P), scorebelief (N,S) log-probabilities; all in the full dtype."""
    dtypes = dtypes_of(config)
    x = stem(params, batch["binaryInputNCHW"], batch["globalInputNC"], dtypes)
    return heads(params, trunk(params, x, tables, config, dtypes), config, dtypes)
