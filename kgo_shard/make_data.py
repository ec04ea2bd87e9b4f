"""Synthetic self-play rows of any number, for trials: stones that nobody played, targets that a network can learn from them.

The positions are not Go. Each board is cut into two smooth territories, stones lie mostly on their own side, groups without
liberties are taken off. The targets follow from that: who owns a point is the side that it lies on, score and value are
what the sides add up to, and the next move is played beside the last one, rather where more stones are.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import Progress, TaskID

from . import layout
from .layout import Column, ValuePlane

NUM_COLUMNS = 80  # of globalTargetsNC in real files; the last ones are zeros
Q_VALUES = "qValueTargetsNCMove"  # in every real file, not read by training
Q_SCALE = 32000
ROWS_PER_FILE = 8192  # where the number of files is not given
MOST_ROWS_PER_FILE = 65536  # a file lies in memory while it is made, and again whenever it is trained on
ROWS_AT_ONCE = 1024  # made together: their scratch arrays stay small
BOARD_EDGES = (2, 37)  # the trainer's smallest; rows grow with the square, and a file of them must fit in memory
LARGEST_KOMI = 7.5


class Plane:
    """Planes of the board input, from the view of the player to move."""

    on_board = 0
    own, other = 1, 2
    liberties = (3, 4, 5)  # stones of groups with one, two, three
    moves = (9, 10, 11, 12, 13)  # the last move first: the opponent's, then the player's, in turns
    ladders = (14, 15, 16)  # now, one move ago, two moves ago; here: stones of groups with one liberty
    ladder_moves = 17  # here: where the opponent's stones in atari can be taken
    own_area, other_area = 18, 19


class Global:
    """Global inputs. The others stay 0, as under area scoring with simple ko and no tax."""

    passes = slice(0, 5)  # the last five moves
    komi = 5  # the player's, divided by 20
    suicide = 8
    pass_ends = 14
    komi_parity = 18


class Unread:
    """Columns of globalTargetsNC that training does not read, filled where it is cheap."""

    short_term = slice(16, 19)
    short_term_score = 19
    final_score = 20
    policy_entropy = 31
    history = slice(36, 41)
    game_hash = slice(41, 47)
    komi = 47
    area_scoring = 48
    turn = 51
    win_minus_loss, score = 57, 58
    visits = 60
    whole_game, version = 62, 63


# The weights that nearly every real row has in full.
FULL_WEIGHTS = [
    Column.row_weight, Column.policy_weight, Column.ownership_weight, Column.reply_weight, Column.future_weight, Column.scoring_weight,
]


class MakeDataError(ValueError):
    """Rows that cannot be made or written; the message names the option or the folder, and what to do."""


def make_data(
    folder: str | Path,
    rows: int = 4096,
    files: int | None = None,
    val_rows: int = 512,
    pos_len: int = 19,
    seed: int = 1234,
    progress: Progress | None = None,
) -> list[Path]:
    """Write `rows` training rows into `files` files of `folder/train` (default: of at most 8192 rows), `val_rows` into `folder/val`.

    Equal arguments give equal arrays, and a file does not depend on how many come after it. The two folders appear when
    all their files are whole. Returns the files, training first. Raises MakeDataError.
    """
    folder = Path(folder)
    sizes = {"train": file_sizes("rows", rows, files), "val": file_sizes("val-rows", val_rows)}
    if not BOARD_EDGES[0] <= pos_len <= BOARD_EDGES[1]:
        raise MakeDataError(f"--pos-len {pos_len}: must be from {BOARD_EDGES[0]} to {BOARD_EDGES[1]}")
    if seed < 0:
        raise MakeDataError(f"--seed {seed}: must be at least 0")
    try:
        with new_folder(folder) as unfinished:
            task = progress.add_task("rows", total=rows + val_rows) if progress else None
            for split, (name, counts) in enumerate(sizes.items()):
                (unfinished / name).mkdir()
                for index, count in enumerate(counts):
                    parts = make_parts(np.random.default_rng([seed, split, index]), count, pos_len)
                    np.savez_compressed(unfinished / name / file_name(index), **join(parts, count, progress, task))
            for name in reversed(sizes):  # training rows last: no run starts without them
                os.rename(unfinished / name, folder / name)
    except OSError as error:
        raise MakeDataError(f"{folder}: cannot be written ({error.strerror}): name another place, or fewer --rows") from None
    return [folder / name / file_name(index) for name, counts in sizes.items() for index in range(len(counts))]


def file_name(index: int) -> str:
    return f"data{index}.npz"


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A place inside `folder` for what is not finished yet; afterwards it is gone, and so is `folder` where it is new and got nothing.

    Inside, because files move at once only within a disk. Raises MakeDataError where the folder holds something already, OSError.
    """
    existed = folder.exists()
    if existed and (not folder.is_dir() or any(folder.iterdir())):
        raise MakeDataError(f"{folder}: is there already and not an empty folder: name another place")
    unfinished = folder / "unfinished"
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not existed and not any(folder.iterdir()):
            folder.rmdir()


def file_sizes(option: str, rows: int, files: int | None = None) -> list[int]:
    """The rows of each file, as equal as can be. MakeDataError where there are no such files."""
    if rows < 1:
        raise MakeDataError(f"--{option} {rows}: must be at least 1")
    if files is None:
        files = -(-rows // ROWS_PER_FILE)
    if not 1 <= files <= rows:
        raise MakeDataError(f"--files {files}: must be from 1 to the number of rows, {rows}")
    if -(-rows // files) > MOST_ROWS_PER_FILE:
        raise MakeDataError(f"--files {files}: a file would hold more than {MOST_ROWS_PER_FILE} rows: give at least {-(-rows // MOST_ROWS_PER_FILE)}")
    return [rows // files + (index < rows % files) for index in range(files)]


def make_parts(random: np.random.Generator, rows: int, pos_len: int) -> Iterator[dict[str, np.ndarray]]:
    """The rows of one file, some at a time."""
    for start in range(0, rows, ROWS_AT_ONCE):
        yield make_rows(random, min(ROWS_AT_ONCE, rows - start), pos_len)


def join(parts: Iterator[dict[str, np.ndarray]], rows: int, progress: Progress | None, task: TaskID | None) -> dict[str, np.ndarray]:
    """The arrays of all parts, `rows` in all, without ever holding them twice."""
    arrays: dict[str, np.ndarray] = {}
    done = 0
    for part in parts:
        for key, value in part.items():
            arrays.setdefault(key, np.empty((rows, *value.shape[1:]), value.dtype))[done : done + len(value)] = value
        done += len(value)
        if progress:
            progress.advance(task, len(value))
    return arrays


def make_rows(random: np.random.Generator, rows: int, pos_len: int) -> dict[str, np.ndarray]:
    """`rows` random positions and their targets, by npz key in the order of real files."""
    side = make_territories(random, rows, pos_len)
    board, liberties, captures = make_board(random, side)
    moves, passed = draw_last_moves(random, board)
    komi = random.integers(-2 * LARGEST_KOMI, 2 * LARGEST_KOMI + 1, rows) / 2

    ownership, seki = settle(random, side, board)
    score = ownership.sum(axis=(1, 2)) + komi
    visits = draw_visits(random, rows)
    policy = draw_policy(random, near(moves[:, 0]), board, visits, passed)
    played = np.argmax(policy, axis=1)
    reply_board = np.where(to_planes(played, pos_len), np.int8(1), board)
    reply = draw_policy(random, near(to_planes(played, pos_len)), reply_board, draw_visits(random, rows), played == pos_len**2)
    targets = make_targets(random, score, komi, board, side, policy, visits)
    return {
        layout.PACKED: make_planes(board, liberties, captures, moves),
        layout.GLOBALS: make_globals(random, komi, passed, pos_len),
        layout.POLICY: np.stack([policy, reply], axis=1).astype(np.int16),
        layout.TARGETS: targets,
        layout.SCORES: score_chances(score, pos_len),
        layout.VALUES: make_value_planes(random, board, side, ownership, seki),
        Q_VALUES: make_q_values(random, policy, targets),
    }


# Boards: (N, P, P), +1 the player to move, -1 the opponent, 0 nobody


def make_territories(random: np.random.Generator, rows: int, pos_len: int) -> np.ndarray:
    """(N, P, P) float64: a few long waves; the sign says whose side a point is on, the size how clearly."""
    axis = (np.arange(pos_len) + 0.5) / pos_len
    waves = random.uniform(-1.2 * math.pi, 1.2 * math.pi, (3, rows, 2))
    phases = random.uniform(0, 2 * math.pi, (3, rows))
    sides = sum(
        np.cos(wave[:, 0, None, None] * axis[:, None] + wave[:, 1, None, None] * axis + phase[:, None, None])
        for wave, phase in zip(waves, phases)
    )
    return sides - 0.7 * sides.mean(axis=(1, 2), keepdims=True)  # else one player would own nearly all of most boards


def make_board(random: np.random.Generator, side: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stones (int8) for `side`; the liberties of each stone's group; where the opponent's stones can be taken. All (N, P, P)."""
    rows = len(side)
    density = random.uniform(0.05, 0.75, rows)[:, None, None]  # from the opening to the end
    owner = np.where(side > 0, 1, -1)
    astray = random.random(side.shape) < 0.06
    board = np.where(random.random(side.shape) < density, np.where(astray, -owner, owner), 0).astype(np.int8)
    liberties, _ = count_liberties(board)
    board[liberties == 0] = 0  # taken; what remains has gained liberties, if anything
    return board, *count_liberties(board)


def neighbours(board: np.ndarray, outside) -> Iterator[np.ndarray]:
    """For each of the four directions the (N, P, P) values one point further; `outside` beyond the edge."""
    padded = np.pad(board, ((0, 0), (1, 1), (1, 1)), constant_values=outside)
    yield from (padded[:, :-2, 1:-1], padded[:, 2:, 1:-1], padded[:, 1:-1, :-2], padded[:, 1:-1, 2:])


def count_liberties(board: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Liberties of each stone's group (-1 where there is no stone), and the points that are the opponent's last liberty."""
    rows, pos_len, _ = board.shape
    points = rows * pos_len * pos_len
    nobody = points  # beyond every group's number
    # A group is called by its smallest point: names spread between equal stones, and along the names that were found.
    group = np.arange(points, dtype=np.int32).reshape(board.shape)
    joined = [(stones == board) & (board != 0) for stones in neighbours(board, 0)]
    while True:
        spread = group
        for name, together in zip(neighbours(group, nobody), joined):
            spread = np.where(together, np.minimum(spread, name), spread)
        spread = spread.reshape(-1)[spread]
        if np.array_equal(spread, group):
            break
        group = spread
    empty = (board == 0)[None]
    beside = np.stack(list(neighbours(np.where(board == 0, np.int32(nobody), group), nobody)))
    beside = np.sort(np.where(empty, beside, nobody), axis=0)
    beside[1:][beside[1:] == beside[:-1]] = nobody  # a point beside two stones of a group is one liberty
    counts = np.bincount(beside.reshape(-1), minlength=points + 1)[:points]
    colors = np.append(board.reshape(-1), np.int8(0))
    last = (np.append(counts, 0)[beside] == 1) & (colors[beside] == -1)
    return np.where(board != 0, counts[group], -1), last.any(axis=0)


def draw_last_moves(random: np.random.Generator, board: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last five moves, (N, 5, P, P) bool, each a stone of its player, none twice; and (N,) whether the very last was a pass."""
    rows = len(board)
    passed = random.random(rows) < 0.03
    flat = board.reshape(rows, -1)
    order = np.argsort(random.random(flat.shape), axis=1)
    shuffled = np.take_along_axis(flat, order, axis=1)
    moves = np.zeros((rows, len(Plane.moves), flat.shape[1]), bool)
    known = np.ones(rows, bool)
    for index in range(len(Plane.moves)):
        stone = shuffled == (1 if index % 2 else -1)
        nth = stone & (np.cumsum(stone, axis=1) == index // 2 + 1)  # of its player's stones in random order
        there = nth.any(axis=1) & known
        if index == 0:
            there &= ~passed
        place = np.take_along_axis(order, np.argmax(nth, axis=1)[:, None], axis=1)[:, 0]
        moves[there, index, place[there]] = True
        known = there | (passed & (index == 0))  # before a move that is not known there is none either
    return moves.reshape(rows, -1, *board.shape[1:]), passed


def settle(random: np.random.Generator, side: np.ndarray, board: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Who owns each point in the end, and whose stones live in seki: (N, P, P) int8 of -1, 0, 1."""
    ownership = np.where(side > 0, 1, -1).astype(np.int8)
    border = np.abs(side) < 0.12
    ownership[border & (board == 0) & (random.random(side.shape) < 0.3)] = 0
    in_seki = border & (random.random(len(side)) < 0.1)[:, None, None]
    ownership[in_seki & (board == 0)] = 0
    ownership[in_seki & (board != 0)] = board[in_seki & (board != 0)]
    return ownership, np.where(in_seki, board, 0).astype(np.int8)


# Moves


def to_planes(move: np.ndarray, pos_len: int) -> np.ndarray:
    """(N, P, P) bool: each row's move, a number up to A; a pass is nowhere."""
    return (move[:, None] == np.arange(pos_len**2)).reshape(-1, pos_len, pos_len)


def near(move: np.ndarray) -> np.ndarray:
    """(N, P, P) float64: 4 beside the move, 1 at its corners."""
    padded = np.pad(move, ((0, 0), (1, 1), (1, 1))).astype(np.float64)
    rows, columns = padded[:, :-2] + padded[:, 2:], padded[..., :-2] + padded[..., 2:]
    return 4 * rows[..., 1:-1] + 4 * columns[:, 1:-1] + rows[..., :-2] + rows[..., 2:]


def draw_visits(random: np.random.Generator, rows: int) -> np.ndarray:
    return random.integers(16, 65, rows)


def draw_policy(random: np.random.Generator, inviting: np.ndarray, board: np.ndarray, visits: np.ndarray, passing: np.ndarray) -> np.ndarray:
    """(N, A + 1) visit counts: on empty points, more where it is inviting and stones are near; a pass is answered by a pass."""
    rows = len(board)
    stones = sum(np.abs(beside) for beside in neighbours(board, 0))
    weights = np.append((0.02 + inviting * (1.0 + stones) ** 2).reshape(rows, -1), np.full((rows, 1), 0.02), axis=1)
    weights[:, :-1][board.reshape(rows, -1) != 0] = 0
    weights[passing, -1] = 10 * weights[passing].sum(axis=1)
    return random.multinomial(visits, weights / weights.sum(axis=1, keepdims=True))


# Arrays of the file


def make_planes(board: np.ndarray, liberties: np.ndarray, captures: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """(N, 22, ceil(A / 8)) uint8: the bit planes, packed."""
    rows, pos_len, _ = board.shape
    planes = np.zeros((rows, layout.NUM_PLANES, pos_len, pos_len), bool)
    planes[:, Plane.on_board] = True
    planes[:, Plane.own], planes[:, Plane.other] = board == 1, board == -1
    for count, plane in enumerate(Plane.liberties, start=1):
        planes[:, plane] = liberties == count
    planes[:, Plane.moves] = moves
    ladder = liberties == 1
    for plane, newer in zip(Plane.ladders, (None, moves[:, 0], moves[:, 1])):
        ladder = ladder if newer is None else ladder & ~newer  # a stone was not there before it was played
        planes[:, plane] = ladder
    planes[:, Plane.ladder_moves] = captures
    for color, plane in ((1, Plane.own_area), (-1, Plane.other_area)):
        inside = np.all([(beside == color) | (beside == 2) for beside in neighbours(board, 2)], axis=0)
        planes[:, plane] = (board == color) | (board == 0) & inside
    return np.packbits(planes.reshape(rows, layout.NUM_PLANES, -1), axis=-1)


def make_globals(random: np.random.Generator, komi: np.ndarray, passed: np.ndarray, pos_len: int) -> np.ndarray:
    """(N, 19) float32."""
    inputs = np.zeros((len(komi), layout.NUM_GLOBALS), np.float32)
    inputs[:, Global.passes.start] = passed
    inputs[:, Global.komi] = komi / 20
    inputs[:, Global.suicide] = random.random(len(komi)) < 0.5
    inputs[:, Global.pass_ends] = passed
    # How far the komi is above the last one that could be a draw, as a wave with period 2 (KataGo's area-scoring feature).
    above = (komi - layout.num_points(pos_len)) % 2
    inputs[:, Global.komi_parity] = np.where(above < 0.5, above, np.where(above < 1.5, 1 - above, above - 2))
    return inputs


def make_targets(
    random: np.random.Generator, score: np.ndarray, komi: np.ndarray, board: np.ndarray, side: np.ndarray, policy: np.ndarray, visits: np.ndarray
) -> np.ndarray:
    """(N, 80) float32: every chance a distribution, every weight 1 but the lead's, which few real rows have."""
    rows, pos_len = len(score), board.shape[1]
    columns = np.zeros((rows, NUM_COLUMNS), np.float32)
    columns[:, 0], columns[:, 1] = (1 + np.sign(score)) / 2, (1 - np.sign(score)) / 2  # half each for a draw
    columns[:, Column.score_mean] = columns[:, Unread.final_score] = score
    # The sooner the value is taken, the less is decided.
    values_and_scores = zip((*Column.td_values, Unread.short_term), (*Column.td_scores, Unread.short_term_score))
    for undecided, (values, expected) in enumerate(values_and_scores, start=1):
        win = 1 / (1 + np.exp(-score / (undecided * pos_len / 4)))
        columns[:, values.start], columns[:, values.start + 1] = win, 1 - win
        columns[:, expected] = score * (1 - 0.08 * undecided)
    has_lead = random.random(rows) < 0.1
    columns[:, Column.lead], columns[:, Column.lead_weight] = np.where(has_lead, score, 0), has_lead
    columns[:, Column.variance_time] = np.sum((board == 0) & (np.abs(side) < 0.5), axis=(1, 2))
    columns[:, FULL_WEIGHTS] = 1
    share = policy / policy.sum(axis=1, keepdims=True)
    columns[:, Unread.policy_entropy] = -np.sum(share * np.log(np.where(share > 0, share, 1)), axis=1)
    columns[:, Unread.history] = 1
    columns[:, Unread.game_hash] = random.integers(0, 2**22, (rows, 6))
    columns[:, Unread.komi], columns[:, Unread.area_scoring] = komi, 1
    columns[:, Unread.turn] = np.count_nonzero(board, axis=(1, 2))
    columns[:, Unread.win_minus_loss] = columns[:, Column.short_term_win] - columns[:, Column.short_term_loss]
    columns[:, Unread.score] = columns[:, Column.short_term_score]
    columns[:, Unread.visits], columns[:, Unread.whole_game], columns[:, Unread.version] = visits, 1, 3
    return columns


def score_chances(score: np.ndarray, pos_len: int) -> np.ndarray:
    """(N, S) int8 percents: all of it in the two buckets beside the score, so that their mean is the score."""
    place = score + layout.num_points(pos_len) + layout.SCORE_MARGIN - 0.5
    lower = np.floor(place).astype(np.int64)
    upper_share = np.rint(100 * (place - lower)).astype(np.int8)
    chances = np.zeros((len(score), layout.num_score_buckets(pos_len)), np.int8)
    row = np.arange(len(score))
    chances[row, lower], chances[row, lower + 1] = 100 - upper_share, upper_share
    return chances


def make_value_planes(random: np.random.Generator, board: np.ndarray, side: np.ndarray, ownership: np.ndarray, seki: np.ndarray) -> np.ndarray:
    """(N, 5, P, P) int8."""
    planes = np.zeros((len(board), layout.NUM_VALUE_PLANES, *board.shape[1:]), np.int8)
    planes[:, ValuePlane.ownership], planes[:, ValuePlane.seki] = ownership, seki
    owner = np.where(side > 0, 1, -1)
    for plane, filled in zip(range(*ValuePlane.future.indices(layout.NUM_VALUE_PLANES)), (0.1, 0.5)):
        planes[:, plane] = np.where((board == 0) & (random.random(board.shape) < filled), owner, board)
    planes[:, ValuePlane.scoring] = 120 * ownership
    return planes


def make_q_values(random: np.random.Generator, policy: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """(N, 3, A + 1) int16: value and score of each visited move, and its visits; zeros for the others."""
    noise = random.normal(0, 0.05, policy.shape)
    value = np.clip(targets[:, Unread.win_minus_loss, None] + noise, -1, 1) * Q_SCALE
    score = targets[:, Unread.score, None] + 20 * noise
    return np.stack([np.where(policy > 0, value, 0), np.where(policy > 0, score, 0), policy], axis=1).astype(np.int16)
