"""The network as Equinox modules: Stem, Block (Attention, SwiGLU), heads, Net.

All modules take a batch of one device's rows. Weights are (out, in), as the original keeps them. Where the order of
two lines looks free it is not: cotangents of an array add up in the order of its uses, and the original's order is kept.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from . import layout
from .config import ModelConfig, Precision

ROTARY_THETA = 100.0
NORM_EPSILON = 1e-6


class Tables(NamedTuple):
    """Constants of a board size.

    Computed eagerly, outside every compiled step: inside one, the compiler would fold the cosines to other last bits.
    """

    cos: Float[Array, "A half_D"]
    sin: Float[Array, "A half_D"]
    score_offsets: Float[Array, " S"]  # the score that each bucket stands for


@functools.cache
def make_tables(config: ModelConfig) -> Tables:
    """Rotary angles [row * f, column * f] with f = 1 / 100^((0, 2, 4, ...) / (D/2)), and the score of every bucket."""
    half = config.head_size // 2
    # A reciprocal, not a negative exponent: the two differ in the last bit of the sines.
    frequencies = 1.0 / ROTARY_THETA ** (jnp.arange(0, half, 2, dtype=jnp.float32) / half)
    edge = jnp.arange(config.pos_len, dtype=jnp.float32)
    row, column = (x.reshape(-1, 1) for x in jnp.meshgrid(edge, edge, indexing="ij"))
    angles = jnp.concatenate([row * frequencies, column * frequencies], axis=-1)
    buckets = jnp.arange(config.num_score_buckets, dtype=jnp.float32)
    offsets = buckets - (config.num_points + layout.SCORE_MARGIN) + 0.5
    # As host constants: the step closes over them, on whatever mesh it runs.
    return Tables(*(jax.device_get(table) for table in (jnp.cos(angles), jnp.sin(angles), offsets)))


class Linear(eqx.Module):
    """x @ weight.T in the compute dtype; the bias, where there is one, is added in float32."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None
    precision: Precision = eqx.field(static=True)

    def __call__(self, x: Float[Array, "... in"], dtype) -> Float[Array, "... out"]:
        y = x.astype(self.precision.compute) @ self.weight.T.astype(self.precision.compute)
        if self.bias is not None:
            y = y.astype(jnp.float32) + self.bias.astype(jnp.float32)
        return y.astype(dtype)


class RMSNorm(eqx.Module):
    """x / sqrt(mean(x^2) + 1e-6) * weight, in float32, returned in x's dtype."""

    weight: Float[Array, " C"]

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        y = x.astype(jnp.float32)
        # y * y, not square(y): their gradients differ in the last bit.
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPSILON) * self.weight.astype(jnp.float32)
        return y.astype(x.dtype)


class Stem(eqx.Module):
    """A 3x3 convolution of the planes, plus a linear map of the global inputs at every point."""

    conv: Float[Array, "C planes 3 3"]
    linear: Linear
    precision: Precision = eqx.field(static=True)

    def __call__(self, planes: Float[Array, "b planes P P"], global_inputs: Float[Array, "b globals"]) -> Float[Array, "b A C"]:
        compute, activation = self.precision.compute, self.precision.activation
        y = jax.lax.conv_general_dilated(
            planes.astype(compute), self.conv.astype(compute), (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        # Summed before the transpose, as in the original: in bfloat16 the compiler drops other roundings after it.
        y = y.astype(activation) + self.linear(global_inputs, activation)[:, :, None, None]
        b, channels, *_ = y.shape
        return y.reshape(b, channels, -1).transpose(0, 2, 1)


def rotate(x: Float[Array, "b A H D"], tables: Tables, dtype) -> Float[Array, "b A H D"]:
    """Rotary embedding, rotate-half form, in `dtype`."""
    cos, sin = (jnp.asarray(table, dtype)[None, :, None, :] for table in (tables.cos, tables.sin))
    x0, x1 = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([x0 * cos - x1 * sin, x1 * cos + x0 * sin], axis=-1)


def project(linears: tuple[Linear, ...] | Linear, x: Float[Array, "b A C"], parts: int, dtype) -> list[Float[Array, "b A out"]]:
    """What each of several matrices makes of x; a fused one holds their rows one after the other."""
    if isinstance(linears, Linear):
        return jnp.split(linears(x, dtype), parts, axis=-1)
    return [linear(x, dtype) for linear in linears]


class Attention(eqx.Module):
    """Multi-head attention over the points of the board."""

    qkv: tuple[Linear, Linear, Linear] | Linear
    out: Linear
    config: ModelConfig = eqx.field(static=True)
    precision: Precision = eqx.field(static=True)

    def __call__(self, x: Float[Array, "b A C"], tables: Tables) -> Float[Array, "b A C"]:
        b, area, channels = x.shape
        precision = self.precision
        heads = (b, area, self.config.num_heads, self.config.head_size)
        q, k, v = (part.reshape(heads) for part in project(self.qkv, x, 3, precision.activation))
        q, k = rotate(q, tables, precision.rope), rotate(k, tables, precision.rope)
        if self.config.attention == "xla":
            y = jax.nn.dot_product_attention(*(part.astype(precision.compute) for part in (q, k, v)))
        else:
            y = self.attend(*(part.transpose(0, 2, 1, 3).astype(precision.compute) for part in (q, k, v))).transpose(0, 2, 1, 3)
        return self.out(y.reshape(b, area, channels), precision.activation)

    def attend(self, q: Float[Array, "b H A D"], k: Float[Array, "b H A D"], v: Float[Array, "b H A D"]) -> Float[Array, "b H A D"]:
        logits = (q @ k.swapaxes(-1, -2)).astype(self.precision.attention_logits)
        weights = jax.nn.softmax(logits * (1 / math.sqrt(self.config.head_size)), axis=-1)
        return weights.astype(self.precision.compute) @ v


class SwiGLU(eqx.Module):
    """down(silu(up(x)) * gate(x))."""

    up_gate: tuple[Linear, Linear] | Linear
    down: Linear
    precision: Precision = eqx.field(static=True)

    def __call__(self, x: Float[Array, "b A C"]) -> Float[Array, "b A C"]:
        up, gate = project(self.up_gate, x, 2, self.precision.activation)
        silu = up * jax.nn.sigmoid(up)
        y = silu.astype(self.precision.ffn_mul) * gate.astype(self.precision.ffn_mul)
        return self.down(y, self.precision.activation)


class Block(eqx.Module):
    """Pre-norm transformer block."""

    norm_attention: RMSNorm
    attention: Attention
    norm_ffn: RMSNorm
    ffn: SwiGLU

    def __call__(self, x: Float[Array, "b A C"], tables: Tables) -> Float[Array, "b A C"]:
        x = x + self.attention(self.norm_attention(x), tables)
        return x + self.ffn(self.norm_ffn(x))


class PolicyHead(eqx.Module):
    """Six policies over the points and pass."""

    board: Linear
    pass_move: Linear


class ValueHead(eqx.Module):
    """Value, score and ownership predictions."""

    spatial_and_value: Linear  # 29 channels at every point
    score: Linear  # one logit for each score bucket


class Outputs(NamedTuple):
    """What the heads predict, float32, before any activation but the log-softmax of the score belief."""

    policy: Float[Array, "b 6 A+1"]
    value: Float[Array, "b 3"]
    misc: Float[Array, "b 10"]
    more_misc: Float[Array, "b 8"]
    ownership: Float[Array, "b 1 P P"]
    scoring: Float[Array, "b 1 P P"]
    future: Float[Array, "b 2 P P"]
    seki: Float[Array, "b 4 P P"]
    score_belief: Float[Array, "b S"]


class Net(eqx.Module):
    """Planes and global inputs of b rows -> Outputs."""

    stem: Stem
    blocks: tuple[Block, ...] | Block  # stacked: leaves with a leading axis of layers
    norm: RMSNorm
    policy_head: PolicyHead
    value_head: ValueHead
    config: ModelConfig = eqx.field(static=True)

    def __call__(self, planes: Float[Array, "b planes P P"], global_inputs: Float[Array, "b globals"], tables: Tables) -> Outputs:
        return self.heads(self.trunk(self.stem(planes, global_inputs), tables))

    def trunk(self, x: Float[Array, "b A C"], tables: Tables) -> Float[Array, "b A C"]:
        def run(x, block):
            return block(x, tables)

        if self.config.rematerialised:
            run = jax.checkpoint(run)
        if self.config.scanned:
            x, _ = jax.lax.scan(lambda x, block: (run(x, block), None), x, self.blocks)
        else:
            # Not one jitted block that all layers call, though it is traced faster: across a call XLA rounds bfloat16 otherwise.
            for block in unstack(self.blocks, self.config.num_layers) if self.config.stacked else self.blocks:
                x = run(x, block)
        return self.norm(x)

    def heads(self, x: Float[Array, "b A C"]) -> Outputs:
        x = x.astype(jnp.float32)
        b, area, _ = x.shape
        edge = math.isqrt(area)
        # One function for both heads: x and its mean are used in the original's order, on which last bits depend.
        board = self.policy_head.board(x, jnp.float32).transpose(0, 2, 1)
        pooled = jnp.mean(x, axis=1)
        pass_move = self.policy_head.pass_move(pooled, jnp.float32)[:, :, None]
        channels = self.value_head.spatial_and_value(x, jnp.float32).transpose(0, 2, 1)
        spatial = channels[:, : layout.Channel.spatial].reshape(b, -1, edge, edge)
        averaged = jnp.mean(channels[:, layout.Channel.spatial :], axis=2)
        return Outputs(
            policy=jnp.concatenate([board, pass_move], axis=-1),
            value=averaged[:, layout.Channel.value],
            misc=averaged[:, layout.Channel.misc],
            more_misc=averaged[:, layout.Channel.more_misc],
            ownership=spatial[:, layout.Channel.ownership],
            scoring=spatial[:, layout.Channel.scoring],
            future=spatial[:, layout.Channel.future],
            seki=spatial[:, layout.Channel.seki],
            score_belief=jax.nn.log_softmax(self.value_head.score(pooled, jnp.float32), axis=-1),
        )


def stack(blocks: tuple[Block, ...]) -> Block:
    """One Block-shaped tree whose leaves are those of `blocks` along a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def unstack(blocks: Block, num_layers: int) -> tuple[Block, ...]:
    return tuple(jax.tree.map(lambda leaf: leaf[i], blocks) for i in range(num_layers))


def matrices(net: "Net") -> "Net":
    """A net-shaped tree of bools: True for matrices and the stem's kernel, which are cast where they are used, False for biases and norm weights."""

    def label(part):
        if isinstance(part, Linear):
            return dataclasses.replace(part, weight=True, bias=None if part.bias is None else False)
        if isinstance(part, RMSNorm):
            return dataclasses.replace(part, weight=False)
        return True

    return jax.tree.map(label, net, is_leaf=lambda part: isinstance(part, (Linear, RMSNorm)))


@functools.cache
def net_shapes(config: ModelConfig, precision: Precision) -> "Net":
    """A Net of shapes and dtypes, without the memory."""
    return jax.eval_shape(lambda: init_net(jax.random.PRNGKey(0), config, precision, init_std=1.0))


def init_net(key: PRNGKeyArray, config: ModelConfig, precision: Precision, init_std: float) -> Net:
    """A fresh network: float32 normal weights times `init_std` (residual outputs: over sqrt(2L)), biases 0, norms 1.

    The key is split once and used in the original's order, so the same seed gives the original's numbers.
    """
    layers, channels, ffn = config.num_layers, config.hidden_size, config.ffn_dim
    keys = iter(jax.random.split(key, 6 + (4 if config.fused else 7) * layers))
    residual_std = init_std / math.sqrt(2 * layers)

    def normal(*shape, std=init_std):
        return (jax.random.normal(next(keys), shape, jnp.float32) * std).astype(precision.param)

    def linear(out, in_, std=init_std, bias=False):
        weight = normal(out, in_, std=std)
        return Linear(weight, jnp.zeros(out, precision.param) if bias else None, precision)

    def norm():
        return RMSNorm(jnp.ones(channels, precision.param))

    def block():
        out, down = linear(channels, channels, residual_std), linear(channels, ffn, residual_std)
        if config.fused:
            qkv, up_gate = linear(3 * channels, channels), linear(2 * ffn, channels)
        else:
            qkv, up_gate = tuple(linear(channels, channels) for _ in "qkv"), (linear(ffn, channels), linear(ffn, channels))
        return Block(norm(), Attention(qkv, out, config, precision), norm(), SwiGLU(up_gate, down, precision))

    stem = Stem(normal(channels, layout.NUM_PLANES, 3, 3), linear(channels, layout.NUM_GLOBALS), precision)
    blocks = tuple(block() for _ in range(layers))
    policy_head = PolicyHead(*(linear(layout.NUM_POLICY_HEADS, channels, bias=True) for _ in range(2)))
    value_head = ValueHead(linear(layout.Channel.count, channels, bias=True), linear(config.num_score_buckets, channels, bias=True))
    return Net(stem, stack(blocks) if config.stacked else blocks, norm(), policy_head, value_head, config)
