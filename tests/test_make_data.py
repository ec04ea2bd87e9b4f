"""`kgo-shard make-data`: rows as real files have them, which a network can learn from, or a refusal that leaves nothing."""

import errno
import os
import resource

import numpy as np
import pytest
from rich.progress import Progress

from kgo_shard import __main__ as command
from kgo_shard import layout, make_data
from kgo_shard.batches import check_files
from kgo_shard.config import Config
from kgo_shard.layout import Column, ValuePlane
from kgo_shard.make_data import MakeDataError, Plane, count_liberties
from kgo_shard.npz import load_rows
from kgo_shard.plot import read_run
from kgo_shard.train import train

BOARDS = (2, 3, 9, 19, 37)


def read(path):
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The training rows of a folder of each board, 200 rows in two files (of the largest board fewer)."""
    folders = {pos_len: tmp_path_factory.mktemp("boards") / str(pos_len) for pos_len in BOARDS}
    for pos_len, folder in folders.items():
        make_data.make_data(folder, rows=200 if pos_len < 37 else 20, files=2, val_rows=7, pos_len=pos_len)
    return folders


@pytest.fixture(scope="module")
def rows(made):
    """The stored arrays of one file of each board."""
    return {pos_len: read(folder / "train" / "data0.npz") for pos_len, folder in made.items()}


def planes_of(arrays, pos_len):
    bits = np.unpackbits(arrays[layout.PACKED], axis=-1, count=pos_len**2)
    return bits.reshape(len(bits), layout.NUM_PLANES, pos_len, pos_len).astype(bool)


# Files


@pytest.mark.parametrize("board", [9, 19])
def test_keys_dtypes_and_shapes_are_those_of_real_files(rows, board, rows9, rows19):
    real = read({9: rows9, 19: rows19}[board] / "train" / "data0.npz")
    assert list(rows[board]) == list(real)
    for key, value in rows[board].items():
        assert (value.dtype, value.shape[1:]) == (real[key].dtype, real[key].shape[1:]), key


@pytest.mark.parametrize("pos_len", BOARDS)
def test_the_trainer_accepts_every_file(made, pos_len):
    files = {split: sorted((made[pos_len] / split).iterdir()) for split in ("train", "val")}
    counts = {split: [len(load_rows(path, pos_len)[layout.TARGETS]) for path in paths] for split, paths in files.items()}
    assert counts == {"train": [100, 100] if pos_len < 37 else [10, 10], "val": [7]}
    config = Config(pos_len=pos_len, batch_size=7)
    assert len(check_files(made[pos_len] / "train", config, 7)) == 2 and len(check_files(made[pos_len] / "val", config, 7)) == 1
    assert sorted(os.listdir(made[pos_len])) == ["train", "val"]


def test_equal_seeds_give_equal_rows_and_other_seeds_others(tmp_path):
    options = {"rows": 30, "files": 2, "val_rows": 15, "pos_len": 5}
    one, two = make_data.make_data(tmp_path / "one", **options, seed=7), make_data.make_data(tmp_path / "two", **options, seed=7)
    for first, second in zip(one, two, strict=True):
        first, second = read(first), read(second)
        for key, value in first.items():
            assert value.tobytes() == second[key].tobytes() and value.dtype == second[key].dtype
    # No file is another's copy, and none depends on how many come after it.
    more = make_data.make_data(tmp_path / "more", **(options | {"rows": 45, "files": 3}), seed=7)
    packed = [read(path)[layout.PACKED].tobytes() for path in more]
    assert packed[:2] == [read(path)[layout.PACKED].tobytes() for path in one[:2]] and len(set(packed)) == 4
    other = make_data.make_data(tmp_path / "other", **options, seed=8)
    assert read(other[0])[layout.PACKED].tobytes() != packed[0]


@pytest.mark.parametrize(("rows", "files", "sizes"), [(10, 3, [4, 3, 3]), (1, 1, [1]), (1, None, [1]), (8192, None, [8192]), (8193, None, [4097, 4096])])
def test_rows_are_spread_evenly_over_the_files(rows, files, sizes):
    assert make_data.file_sizes("rows", rows, files) == sizes


def test_a_large_file_is_made_in_parts_that_are_as_good_as_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(make_data, "ROWS_AT_ONCE", 8)
    with Progress(disable=True) as progress:
        (path, _) = make_data.make_data(tmp_path / "parts", rows=20, val_rows=4, pos_len=5, progress=progress)
        (task,) = progress.tasks
        assert task.completed == task.total == 24
    arrays = load_rows(path, 5)
    assert {len(value) for value in arrays.values()} == {20}
    assert len(np.unique(arrays[layout.VALUES].reshape(20, -1), axis=0)) == 20, "a part is not there twice, nor left empty"


# Rows


@pytest.mark.parametrize("pos_len", BOARDS)
def test_the_board_is_full_and_stones_do_not_overlap(rows, pos_len):
    planes = planes_of(rows[pos_len], pos_len)
    own, other = planes[:, Plane.own], planes[:, Plane.other]
    assert planes[:, Plane.on_board].all() and not (own & other).any()
    assert own.any() and other.any() and (~own & ~other).any(axis=(1, 2)).all()
    assert not (planes[:, Plane.own_area] & planes[:, Plane.other_area]).any()
    assert (planes[:, Plane.own_area] >= own).all() and (planes[:, Plane.other_area] >= other).all()
    padding = np.unpackbits(rows[pos_len][layout.PACKED], axis=-1)[..., pos_len**2 :]
    assert not padding.any()


def group_liberties(board, row, column):
    """By walking over the group, as anybody would count."""
    group, liberties, todo = set(), set(), [(row, column)]
    while todo:
        point = todo.pop()
        if point in group:
            continue
        group.add(point)
        for step in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            beside = point[0] + step[0], point[1] + step[1]
            if min(beside) >= 0 and max(beside) < len(board):
                if board[beside] == 0:
                    liberties.add(beside)
                elif board[beside] == board[point]:
                    todo.append(beside)
    return liberties


@pytest.mark.parametrize("pos_len", [2, 9])
def test_liberties_are_those_of_the_groups(pos_len):
    random = np.random.default_rng(pos_len)
    boards = random.choice([-1, 0, 1], (60, pos_len, pos_len), p=[0.4, 0.2, 0.4]).astype(np.int8)
    boards[0], boards[1, 0, 0], boards[2] = 0, 0, 1
    liberties, captures = count_liberties(boards)
    for board, counted, taken in zip(boards, liberties, captures):
        last = set()
        for point in np.ndindex(board.shape):
            found = group_liberties(board, *point) if board[point] else None
            assert counted[point] == (-1 if found is None else len(found))
            if board[point] == -1 and len(found) == 1:
                last |= found
        assert {tuple(map(int, point)) for point in np.argwhere(taken)} == last


@pytest.mark.parametrize("pos_len", BOARDS)
def test_no_group_is_without_liberties_and_the_planes_say_how_many_it_has(rows, pos_len):
    planes = planes_of(rows[pos_len], pos_len)
    board = planes[:, Plane.own].astype(np.int8) - planes[:, Plane.other]
    liberties, captures = count_liberties(board)
    assert (liberties[board != 0] > 0).all()
    for count, plane in enumerate(Plane.liberties, start=1):
        np.testing.assert_array_equal(planes[:, plane], liberties == count)
    np.testing.assert_array_equal(planes[:, Plane.ladder_moves], captures)
    now, one_ago, two_ago = (planes[:, plane] for plane in Plane.ladders)
    np.testing.assert_array_equal(now, liberties == 1)
    np.testing.assert_array_equal(one_ago, now & ~planes[:, Plane.moves[0]])
    np.testing.assert_array_equal(two_ago, one_ago & ~planes[:, Plane.moves[1]])


@pytest.mark.parametrize("pos_len", BOARDS)
def test_the_last_moves_are_stones_of_their_players(rows, pos_len):
    planes, passed = planes_of(rows[pos_len], pos_len), rows[pos_len][layout.GLOBALS][:, 0].astype(bool)
    moves = planes[:, Plane.moves]
    count = moves.sum(axis=(2, 3))
    assert count.max() == 1 and moves.sum(axis=1).max() == 1, "one stone a move, and no stone twice"
    for index in range(5):
        player = planes[:, Plane.own if index % 2 else Plane.other]
        assert (player >= moves[:, index]).all()
        if index:
            before = count[:, index - 1].astype(bool) | (passed & (index == 1))
            assert (before >= count[:, index]).all(), "an older move is known only where the newer ones are"
    assert not count[passed, 0].any()
    if pos_len == 9:
        assert count[:, 0].mean() > 0.9 and passed.any()


@pytest.mark.parametrize("pos_len", BOARDS)
def test_moves_are_on_empty_points_and_every_policy_has_visits(rows, pos_len):
    planes, policy = planes_of(rows[pos_len], pos_len), rows[pos_len][layout.POLICY]
    stones = (planes[:, Plane.own] | planes[:, Plane.other]).reshape(len(planes), -1)
    assert (policy.sum(axis=-1) > 0).all() and policy.min() == 0
    assert not policy[:, :, :-1][np.repeat(stones[:, None], 2, axis=1)].any()
    first = policy[:, 0].argmax(axis=1)
    assert not policy[np.arange(len(policy)), 1, first][first < pos_len**2].any(), "the reply is not where the player has just moved"


@pytest.mark.parametrize("pos_len", BOARDS)
def test_chances_are_distributions_and_weights_are_weights(rows, pos_len):
    targets = rows[pos_len][layout.TARGETS]
    for columns in (Column.value, *Column.td_values):
        np.testing.assert_allclose(targets[:, columns].sum(axis=1), 1, rtol=0, atol=2 * np.finfo(np.float32).eps)
        assert targets[:, columns].min() >= 0
    for weight in make_data.FULL_WEIGHTS:
        assert (targets[:, weight] == 1).all()
    assert set(np.unique(targets[:, Column.lead_weight])) <= {0, 1}
    assert not targets[:, [Column.td_weight_off, Column.value_weight_off]].any()
    assert (targets[:, Column.variance_time] >= 0).all() and np.isfinite(targets).all()


@pytest.mark.parametrize("pos_len", BOARDS)
def test_value_score_and_its_distribution_say_what_the_board_says(rows, pos_len):
    arrays = rows[pos_len]
    targets, values = arrays[layout.TARGETS], arrays[layout.VALUES]
    komi = 20 * arrays[layout.GLOBALS][:, 5]
    score = values[:, ValuePlane.ownership].sum(axis=(1, 2), dtype=np.int64) + komi
    np.testing.assert_allclose(targets[:, Column.score_mean], score, rtol=0, atol=1e-4)
    exact = targets[:, Column.score_mean]
    np.testing.assert_array_equal(targets[:, 0] - targets[:, 1], np.sign(exact))
    buckets = layout.num_score_buckets(pos_len)
    middle = np.arange(buckets) - buckets / 2 + 0.5
    assert (arrays[layout.SCORES].sum(axis=1, dtype=np.int64) == 100).all() and arrays[layout.SCORES].min() >= 0
    np.testing.assert_array_equal(arrays[layout.SCORES] @ middle / 100, exact)
    if pos_len == 9:
        assert 0.3 < targets[:, 0].mean() < 0.7, "neither player always wins"
        assert np.median(np.abs(values[:, ValuePlane.ownership].mean(axis=(1, 2)))) < 0.5, "nor owns nearly all of most boards"


@pytest.mark.parametrize("pos_len", BOARDS)
def test_value_planes_fit_the_stones(rows, pos_len):
    planes, values = planes_of(rows[pos_len], pos_len), rows[pos_len][layout.VALUES]
    board = planes[:, Plane.own].astype(np.int8) - planes[:, Plane.other]
    ownership, seki = values[:, ValuePlane.ownership], values[:, ValuePlane.seki]
    assert set(np.unique(values[:, :4])) <= {-1, 0, 1}
    assert (ownership[board != 0] != 0).all()
    assert (seki[seki != 0] == board[seki != 0]).all() and (ownership[seki != 0] == seki[seki != 0]).all()
    for plane in range(4)[ValuePlane.future]:
        np.testing.assert_array_equal(values[:, plane][board != 0], board[board != 0])
    np.testing.assert_array_equal(values[:, ValuePlane.scoring], 120 * ownership)
    if pos_len == 9:
        assert seki.any() and (ownership[board != 0] == board[board != 0]).mean() > 0.85, "stones say whose side they are on"


def test_in_a_seki_only_its_stones_own_points():
    board = np.random.default_rng(0).choice([-1, 0, 1], (200, 5, 5)).astype(np.int8)
    ownership, seki = make_data.settle(np.random.default_rng(1), np.full(board.shape, 0.01), board)
    rows = seki.any(axis=(1, 2))
    assert 0 < rows.sum() < 100, "few boards have one"
    np.testing.assert_array_equal(ownership[rows], board[rows])
    assert (ownership[~rows][board[~rows] != 0] == 1).all()


def entropy(chances):
    return -np.sum(chances * np.log(np.where(chances > 0, chances, 1)), axis=-1)


def test_the_next_move_depends_on_the_last_one(rows):
    planes, policy = planes_of(rows[9], 9), rows[9][layout.POLICY][:, 0]
    share = policy / policy.sum(axis=1, keepdims=True)
    assert entropy(share).mean() < 0.5 * entropy(share.mean(axis=0))
    last = planes[:, Plane.moves[0]]
    known = last.any(axis=(1, 2))
    row, column = np.divmod(last.reshape(len(last), -1).argmax(axis=1), 9)
    rows_, columns = np.indices((9, 9))
    close = np.maximum(np.abs(rows_ - row[:, None, None]), np.abs(columns - column[:, None, None])) <= 1
    beside = np.sum(share[:, :81] * close.reshape(len(last), -1), axis=1)
    assert beside[known].mean() > 0.8 > 9 / 82


def test_a_pass_is_answered_by_a_pass_and_hardly_any_move_is(rows):
    passed = rows[9][layout.GLOBALS][:, 0] == 1
    share = rows[9][layout.POLICY][:, 0, -1] / rows[9][layout.POLICY][:, 0].sum(axis=1)
    assert passed.any() and share[passed].min() > 0.5 and share[~passed].mean() < 0.05


# Refusals


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": 0}, "--rows 0: must be at least 1"),
        ({"rows": -5}, "--rows -5"),
        ({"val_rows": 0}, "--val-rows 0"),
        ({"files": 0}, "--files 0: must be from 1 to the number of rows"),
        ({"rows": 3, "files": 4}, "--files 4: must be from 1 to the number of rows, 3"),
        ({"rows": 1_000_000, "files": 2}, "--files 2: a file would hold more than 65536 rows: give at least 16"),
        ({"pos_len": 1}, "--pos-len 1: must be from 2 to 37"),
        ({"pos_len": 38}, "--pos-len 38"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_before_anything_is_written(tmp_path, options, named):
    with pytest.raises(MakeDataError) as error:
        make_data.make_data(tmp_path / "new", **options)
    assert named in str(error.value) and list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(MakeDataError, match="is there already") as error:
            make_data.make_data(path, rows=1, val_rows=1, pos_len=2)
        assert str(path) in str(error.value)
    assert (tmp_path / "unfinished" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert all(path.is_file() for path in make_data.make_data(tmp_path / "empty", rows=1, val_rows=1, pos_len=2))


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # no file may grow beyond it
    try:
        for folder in (tmp_path / "new", tmp_path / "empty"):
            with pytest.raises(MakeDataError) as error:
                make_data.make_data(folder, rows=100, val_rows=1)
            assert f"{folder}: cannot be written ({os.strerror(errno.EFBIG)})" in str(error.value) and "\n" not in str(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["empty"] and os.listdir(tmp_path / "empty") == []
    with pytest.raises(MakeDataError, match="cannot be written"):
        (tmp_path / "file").write_text("mine")
        make_data.make_data(tmp_path / "file" / "below", rows=1, val_rows=1, pos_len=2)


def test_nothing_is_under_its_name_before_all_is_there(tmp_path, monkeypatch):
    seen, real = [], np.savez_compressed

    def watched(path, **arrays):
        seen.append(sorted(os.listdir(tmp_path / "new")))
        if len(seen) == 3:
            raise KeyboardInterrupt
        real(path, **arrays)

    monkeypatch.setattr(np, "savez_compressed", watched)
    with pytest.raises(KeyboardInterrupt):
        make_data.make_data(tmp_path / "new", rows=4, files=2, val_rows=1, pos_len=2)
    assert seen == [["unfinished"]] * 3 and list(tmp_path.iterdir()) == []


# The command


def test_the_command_writes_the_rows_and_says_what_they_are(tmp_path, capsys):
    sizes = "--rows 10 --files 3 --val-rows 2 --pos-len 5 --seed 3".split()
    assert command.main(["make-data", str(tmp_path / "new"), *sizes]) == 0
    shown = capsys.readouterr()
    assert f"{tmp_path / 'new'}: 10 training and 2 validation rows, 4 files" in shown.out and shown.err == ""
    same = make_data.make_data(tmp_path / "same", rows=10, files=3, val_rows=2, pos_len=5, seed=3)
    for path in same:
        twin = tmp_path / "new" / path.relative_to(tmp_path / "same")
        assert read(path)[layout.TARGETS].tobytes() == read(twin)[layout.TARGETS].tobytes()
    assert command.main(["make-data", str(tmp_path / "new")]) == 2
    shown = capsys.readouterr()
    assert shown.out.strip() == "" and shown.err == f"error: {tmp_path / 'new'}: is there already and not an empty folder: name another place\n"


@pytest.mark.long
def test_a_short_training_learns_more_than_any_constant_guess_knows(tmp_path):
    """Moves, winner and owners: below the entropy of the validation rows' own mean, which no constant guess can beat."""
    data, lines = tmp_path / "data", []
    make_data.make_data(data, rows=6400, val_rows=512, pos_len=7)
    config = Config(traindir=tmp_path / "run", datadir=data, pos_len=7, batch_size=32, model_kind="b2c32", compute_dtype="float32", lr=3e-3,
                    warmup_samples=320, max_training_samples=9600, max_val_batches=0, no_final_save=True)
    train(config, log=lines.append)
    log = tmp_path / "run.log"
    log.write_text("\n".join(lines) + "\n")
    run = read_run(log)
    learned = {name: run.curve("validation", name)[1][-1] for name in ("p0loss", "vloss", "oloss")}
    first = {name: run.curve("train", name)[1][0] for name in learned}

    arrays = read(data / "val" / "data0.npz")
    policy = arrays[layout.POLICY][:, 0] / arrays[layout.POLICY][:, 0].sum(axis=1, keepdims=True)
    ownership = np.stack([1 + arrays[layout.VALUES][:, 0], 1 - arrays[layout.VALUES][:, 0]], axis=-1) / 2
    guess = {
        "p0loss": entropy(policy.mean(axis=0)),
        "vloss": 1.2 * entropy(arrays[layout.TARGETS][:, Column.value].mean(axis=0)),
        "oloss": 1.5 * entropy(ownership.mean(axis=0)).mean(),
    }
    for name, value in learned.items():
        assert value < 0.9 * guess[name] and value < first[name], (name, value, guess[name], first[name])
