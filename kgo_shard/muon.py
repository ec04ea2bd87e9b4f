"""Muon: which matrices it takes, how it cuts them up, and the iteration that makes each piece nearly orthogonal.

Not optax.contrib.muon, which has an averaged Nesterov momentum, other coefficients and no heads. The iteration is the
"Polar Express" (Amsel, Persson, Musco and Gower, 2025), in bfloat16.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from . import reduce, shares
from .config import Config
from .model import Block, Linear, net_shapes, stack, unstack

BY_HEADS, BY_ROWS = "muon by heads", "muon by rows"  # labels of Muon's leaves, by how they are cut up
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def label_block(block: Block, target: str, other: str) -> Block:
    """A block-shaped tree of labels: Muon's for the matrices that `target` (--muon-target) names, `other` for the rest."""

    def label(linear: Linear, part: str, cut: str) -> Linear:
        rows, columns = linear.weight.shape[-2:]
        chosen = target in ("all", part) or (target == "square" and rows == columns)
        return dataclasses.replace(linear, weight=cut if chosen else other)

    def label_all(linears, part: str, cut: str):
        return jax.tree.map(lambda linear: label(linear, part, cut), linears, is_leaf=lambda x: isinstance(x, Linear))

    attention, ffn = block.attention, block.ffn
    return dataclasses.replace(
        jax.tree.map(lambda _: other, block),
        attention=dataclasses.replace(attention, qkv=label_all(attention.qkv, "attn", BY_HEADS), out=label(attention.out, "attn", BY_ROWS)),
        ffn=dataclasses.replace(ffn, up_gate=label_all(ffn.up_gate, "ffn", BY_ROWS), down=label(ffn.down, "ffn", BY_ROWS)),
    )


def directions(blocks, cut: str, config: Config):
    """Blocks of momenta -> blocks of directions in the update dtype; leaves of another label are None on both sides.

    With --muon-group-blocks the same matrix of all blocks goes through the iteration as one stack.
    """

    if config.splits_state:
        return dealt_directions(blocks, cut, config)

    def orthogonal(m):
        return orthogonalize(split(m, cut, config), config.muon_polar_steps)

    def direction(pieces, m):
        # Scaled after the stack is taken apart: a slice between scale and learning rate would keep XLA from folding them.
        scale = jnp.asarray(math.sqrt(max(pieces.shape[-2:])), pieces.dtype)
        return (pieces * scale).reshape(m.shape).astype(config.precision.opt_update)

    if config.muon_group_blocks and isinstance(blocks, tuple):
        pieces = unstack(jax.tree.map(orthogonal, stack(blocks)), len(blocks))
    else:
        pieces = jax.tree.map(orthogonal, blocks)
    return jax.tree.map(direction, pieces, blocks)


def dealt_directions(blocks, cut: str, config: Config):
    """The same from shares to shares: matrices of one shape, of all blocks, are dealt out over the devices, each whole on one of them.

    They travel in bfloat16, which is what the iteration takes and gives. As above they are scaled after every slice, and before a
    reshape where a matrix was cut up: that decides what XLA folds.
    """
    leaves, structure = jax.tree.flatten(blocks)
    shapes = [leaf.shape[-2:] for leaf in jax.tree.leaves(whole_matrices(blocks, config))]
    directions = [None] * len(leaves)
    for shape in dict.fromkeys(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        parts = jnp.concatenate([leaves[i].swapaxes(0, 1) for i in places]).astype(jnp.bfloat16)  # (matrices, 1, n)
        dealt = reduce.deal(parts, at_least=2)  # a batch of one product is another program, with another order of sums
        whole = jax.vmap(lambda part: shares.join(part, shape))(dealt)
        pieces = orthogonalize(split(whole, cut, config), config.muon_polar_steps)
        own = jax.vmap(lambda matrix: shares.cut(matrix, 1, dealt.shape[1]))(pieces.reshape(whole.shape))
        scale = jnp.asarray(math.sqrt(max(pieces.shape[-2:])), pieces.dtype)
        for i, part in zip(places, jnp.split(reduce.collect(own, len(parts)), len(places)), strict=True):
            part = part.swapaxes(0, 1)
            scaled = part * scale if pieces.shape == whole.shape else (part.reshape(-1) * scale).reshape(part.shape)
            directions[i] = scaled.astype(config.precision.opt_update)
    return jax.tree.unflatten(structure, directions)


def whole_matrices(blocks, config: Config):
    """The shapes of the matrices that blocks of shares are of; leaves of another label are None here too."""
    like = net_shapes(config.model, config.precision).blocks
    return jax.tree.map(lambda m, like: None if m is None else like, blocks, like, is_leaf=lambda x: x is None)


def split(m: Float[Array, "... rows columns"], cut: str, config: Config) -> Float[Array, "... pieces rows_of_one columns"]:
    """The matrices that are orthogonalised: one for each head, or chunks of --muon-row-split-size rows where they divide."""
    *leading, rows, columns = m.shape
    size = config.model.head_size if cut == BY_HEADS else config.muon_row_split_size
    if cut == BY_ROWS and not (0 < size < rows and rows % size == 0):
        return m
    return m.reshape(*leading, rows // size, size, columns)


def orthogonalize(x: Float[Array, "... rows columns"], steps: int) -> Float[Array, "... rows columns"]:
    """bfloat16: every matrix with its singular values moved towards 1 by `steps` steps of an odd quintic polynomial."""
    x = x.astype(jnp.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.swapaxes(-1, -2)
    y = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(y * y, axis=(-2, -1), keepdims=True))
    x = (y / (1.02 * norm + 1e-6)).astype(jnp.bfloat16)
    for a, b, c in COEFFICIENTS[:steps]:
        gram = x @ x.swapaxes(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(-1, -2) if tall else x
