"""Stored rows -> the arrays that the network reads: unpack bits, drop history, turn the board. On the device.

Everything here moves numbers or multiplies them by zero or one, so it is exact: the same arrays as the original's
NumPy loader makes on the host, at an eighth of the bytes.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from . import layout

LADDERS = (14, 15, 16)  # laddered stones now, one move ago, two moves ago
FIRST_HISTORY_PLANE = 9


def expand(batch: dict[str, Array], pos_len: int) -> dict[str, Array]:
    """Float32 arrays under the original's six keys, from a packed batch or from one that is already expanded.

    What the batch carries decides: packed planes are unpacked, history is dropped where `historyInclude` is there,
    the board is turned where `symmetry` is.
    """
    planes = unpack(batch[layout.PACKED], pos_len) if layout.PACKED in batch else batch[layout.PLANES].astype(jnp.float32)
    arrays = {layout.PLANES: planes} | {
        key: batch[key].astype(jnp.float32) for key in (layout.GLOBALS, layout.POLICY, layout.TARGETS, layout.SCORES, layout.VALUES)
    }
    if layout.HISTORY in batch:
        arrays |= drop_history(arrays[layout.PLANES], arrays[layout.GLOBALS], batch[layout.HISTORY])
    if layout.SYMMETRY in batch:
        arrays |= turn(arrays, batch[layout.SYMMETRY], pos_len)
    return arrays


def unpack(packed: Int[Array, "b planes bytes"], pos_len: int) -> Float[Array, "b planes P P"]:
    """Bit planes, packed big-endian along the last axis, as zeros and ones."""
    bits = jnp.unpackbits(packed, axis=-1, count=layout.num_points(pos_len))
    return bits.reshape(*packed.shape[:2], pos_len, pos_len).astype(jnp.float32)


def drop_history(
    planes: Float[Array, "b planes P P"], global_inputs: Float[Array, "b globals"], include: Float[Array, "b 5"]
) -> dict[str, Array]:
    """Forget the moves that `include` marks 0.

    A forgotten move's plane is cleared; the ladder planes of one and two moves ago, which would betray it, fall back
    to the newest position that is still known.
    """
    keep = include[:, :, None, None]
    moves = slice(FIRST_HISTORY_PLANE, FIRST_HISTORY_PLANE + layout.NUM_HISTORY)
    now, one_ago, two_ago = (planes[:, plane] for plane in LADDERS)
    one, two = include[:, 0, None, None], include[:, 1, None, None]
    planes = planes.at[:, moves].multiply(keep)
    planes = planes.at[:, LADDERS[1]].set((1 - one) * now + one * one_ago)
    planes = planes.at[:, LADDERS[2]].set((1 - one) * now + (one - two) * one_ago + two * two_ago)
    return {layout.PLANES: planes, layout.GLOBALS: global_inputs.at[:, : layout.NUM_HISTORY].multiply(include)}


def symmetry_table(pos_len: int) -> np.ndarray:
    """(8, A) int32: entry [k, i] is the point whose value image k shows at point i.

    0 identity; 1 transpose, flip rows; 2 flip both; 3 transpose, flip columns; 4 transpose; 5 flip columns;
    6 transpose, flip both; 7 flip rows.
    """
    board = np.arange(layout.num_points(pos_len), dtype=np.int32).reshape(pos_len, pos_len)
    flipped = board.T
    images = [board, flipped[::-1], board[::-1, ::-1], flipped[:, ::-1], flipped, board[:, ::-1], flipped[::-1, ::-1], board[::-1]]
    return np.stack([image.reshape(-1) for image in images])


def turn(arrays: dict[str, Array], symmetry: Int[Array, " b"], pos_len: int) -> dict[str, Array]:
    """The rows' boards under their symmetries: planes, value targets and policy targets (pass stays)."""
    area = layout.num_points(pos_len)
    source = jnp.asarray(symmetry_table(pos_len))[symmetry]  # (b, A)

    def turn_points(x):
        return jnp.take_along_axis(x, source[:, None, :], axis=-1)

    def turn_board(x):
        return turn_points(x.reshape(*x.shape[:2], area)).reshape(x.shape)

    policy = arrays[layout.POLICY]
    return {
        layout.PLANES: turn_board(arrays[layout.PLANES]),
        layout.VALUES: turn_board(arrays[layout.VALUES]),
        layout.POLICY: jnp.concatenate([turn_points(policy[..., :area]), policy[..., area:]], axis=-1),
    }
