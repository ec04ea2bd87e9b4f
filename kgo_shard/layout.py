"""The npz contract: names, shapes, dtypes, target columns and head channels, each written down once.

Dimension letters used everywhere: B batch rows, b rows of one device, P board edge (`pos_len`), A = P * P points,
C channels, H heads, D head size, F feed-forward channels, S = 2 * (A + 60) score buckets, K steps per call.
"""

NUM_PLANES = 22
NUM_GLOBALS = 19
NUM_HISTORY = 5  # the last five moves: planes 9..13 and the first five global inputs
NUM_TARGET_COLUMNS = 41  # columns that are read; KataGo writes 64 and more
NUM_POLICY_TARGETS = 2  # the player's move and the opponent's reply; further rows of upstream files are not read
NUM_VALUE_PLANES = 5
SCORE_MARGIN = 60  # score buckets reach this far beyond the number of points, on both sides

PACKED = "binaryInputNCHWPacked"
PLANES = "binaryInputNCHW"
GLOBALS = "globalInputNC"
POLICY = "policyTargetsNCMove"
TARGETS = "globalTargetsNC"
SCORES = "scoreDistrN"
VALUES = "valueTargetsNCHW"

# What travels with packed rows so that the device can finish them (augment.py).
HISTORY = "historyInclude"  # (B, 5) float32 of zeros and ones
SYMMETRY = "symmetry"  # (B,) int32, 0..7


def num_points(pos_len: int) -> int:
    """A, the number of points of the board."""
    return pos_len * pos_len


def num_score_buckets(pos_len: int) -> int:
    """S: bucket i stands for the score i - (A + 60) + 0.5."""
    return 2 * (num_points(pos_len) + SCORE_MARGIN)


def row_shapes(pos_len: int) -> dict[str, tuple[int, ...]]:
    """Shape of one row of every array that training reads, by npz key."""
    area = num_points(pos_len)
    return {
        PACKED: (NUM_PLANES, (area + 7) // 8),
        PLANES: (NUM_PLANES, pos_len, pos_len),
        GLOBALS: (NUM_GLOBALS,),
        POLICY: (NUM_POLICY_TARGETS, area + 1),
        TARGETS: (NUM_TARGET_COLUMNS,),
        SCORES: (num_score_buckets(pos_len),),
        VALUES: (NUM_VALUE_PLANES, pos_len, pos_len),
    }


class Column:
    """Columns of `globalTargetsNC` (float32)."""

    value = slice(0, 3)  # win, loss, no result
    score_mean = 3
    td_values = (slice(4, 7), slice(8, 11), slice(12, 15))
    td_scores = (7, 11, 15)
    short_term_win, short_term_loss = 12, 13
    short_term_score = 15
    lead = 21
    variance_time = 22
    td_weight_off = 24  # weight = 1 - column
    row_weight = 25
    policy_weight = 26
    ownership_weight = 27
    reply_weight = 28
    lead_weight = 29
    future_weight = 33
    scoring_weight = 34
    value_weight_off = 35  # weight = 1 - column


class ValuePlane:
    """Planes of `valueTargetsNCHW`."""

    ownership = 0
    seki = 1
    future = slice(2, 4)
    scoring = 4  # times 120


class Channel:
    """Channels of the value head: 8 spatial ones, then 21 averaged over the board."""

    count = 29
    spatial = 8
    ownership = slice(0, 1)
    scoring = slice(1, 2)
    future = slice(2, 4)
    seki = slice(4, 8)
    value = slice(0, 3)  # from here on: position among the 21
    misc = slice(3, 13)
    more_misc = slice(13, 21)


NUM_POLICY_HEADS = 6
