"""Data that strangers made: every bad file ends a run in one line, or is skipped, and nothing of it is trained on."""

import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest

from kgo_shard import store
from kgo_shard.checkpoint import load_checkpoint
from kgo_shard.config import Config
from kgo_shard.npz import DataError, load_rows
from kgo_shard.train import main, train

from .test_continuation import logged, train_module
from .test_npz import GLOBALS, PACKED, POLICY, SCORES, TARGETS, VALUES, RunsCode, read
from .test_store import free  # noqa: F401
from .test_train import words_of

SMALL = {
    "pos_len": 9, "batch_size": 16, "model_kind": "b2c32", "max_training_samples": 6 * 16, "print_every": 1, "max_val_batches": 1,
    "compute_dtype": "float32", "save_every_samples": 32,
}  # fmt: skip


def npz_bytes(arrays: dict) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def with_row(array, row, value, *place):
    array = array.astype(np.result_type(array, np.float32)) if isinstance(value, float) else array.copy()
    array[(row, *place)] = value
    return array


def flip_a_byte(rows):
    """In the middle of the value targets, as they lie in the file."""
    content = bytearray(npz_bytes(rows))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entry = archive.getinfo(VALUES + ".npy")
    content[entry.header_offset + entry.compress_size // 2] ^= 0x10
    return bytes(content)


def huge_header(rows):
    """Global inputs that promise 2**50 rows."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (2**50, 19)})
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(npz_bytes(rows))) as archive, zipfile.ZipFile(out, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, buffer.getvalue() + bytes(16 * 19 * 4) if name == GLOBALS + ".npy" else archive.read(name))
    return out.getvalue()


def long_header(rows):
    """Global inputs whose header says it is four gigabytes long."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(npz_bytes(rows))) as archive, zipfile.ZipFile(out, "w") as changed:
        for name in archive.namelist():
            long = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{" * 5000
            changed.writestr(name, long if name == GLOBALS + ".npy" else archive.read(name))
    return out.getvalue()


def weightless(rows):
    """A row without a policy and without the weight of one."""
    return npz_bytes(rows | {POLICY: with_row(rows[POLICY], 21, 0), TARGETS: with_row(rows[TARGETS], 21, 0.0, 26)})


# What a stranger's file is -> (its bytes, words that its one line must have). The row, where one is to blame, is 21.
CASES = {
    "truncated zip": (lambda rows: npz_bytes(rows)[:-2000], ["cannot be read as an npz file", "replace it"]),
    "one flipped byte": (flip_a_byte, [f"key {VALUES}", "CRC", "replace it"]),
    "missing key": (lambda rows: npz_bytes({k: v for k, v in rows.items() if k != SCORES}), [f"key {SCORES} is missing", "write the file again"]),
    "wrong dtype": (lambda rows: npz_bytes(rows | {PACKED: rows[PACKED].astype(np.int16)}), [f"key {PACKED} has dtype int16, expected uint8"]),
    "text": (lambda rows: npz_bytes(rows | {GLOBALS: rows[GLOBALS].astype("U8")}), [f"key {GLOBALS} has dtype <U8, expected numbers"]),
    "other planes": (lambda rows: npz_bytes(rows | {PACKED: rows[PACKED][:, :20]}), [f"key {PACKED} has shape (48, 20, 11), expected (N, 22, 11)"]),
    "other globals": (lambda rows: npz_bytes(rows | {GLOBALS: rows[GLOBALS][:, :17]}), [f"key {GLOBALS} has shape (48, 17), expected (N, 19)"]),
    "nan target": (lambda rows: npz_bytes(rows | {TARGETS: with_row(rows[TARGETS], 21, np.nan, 3)}), [f"key {TARGETS} row 21 is not finite (1 such rows)"]),
    "infinite input": (lambda rows: npz_bytes(rows | {GLOBALS: with_row(rows[GLOBALS], 21, np.inf, 0)}), [f"key {GLOBALS} row 21 is not finite"]),
    "double too large for float32": (
        lambda rows: npz_bytes(rows | {TARGETS: with_row(rows[TARGETS].astype(np.float64), 21, 1e300, 3)}), [f"key {TARGETS} row 21 is not finite"],
    ),
    "all-zero policy": (lambda rows: npz_bytes(rows | {POLICY: with_row(rows[POLICY], 21, 0, 0)}), [f"key {POLICY} row 21 policy 0 is all zero"]),
    "all-zero policy, no weight": (weightless, [f"key {POLICY} row 21 policy 0 is all zero"]),
    "negative count": (lambda rows: npz_bytes(rows | {POLICY: with_row(rows[POLICY], 21, -1, 1, 5)}), [f"key {POLICY} row 21 policy 1", "negative"]),
    "negative score": (lambda rows: npz_bytes(rows | {SCORES: with_row(rows[SCORES], 21, -1, 7)}), [f"key {SCORES} row 21 is negative"]),
    "negative weight": (lambda rows: npz_bytes(rows | {TARGETS: with_row(rows[TARGETS], 21, -1.0, 25)}), [f"key {TARGETS} row 21 column 25 (row_weight) is negative"]),
    "different lengths": (lambda rows: npz_bytes(rows | {SCORES: rows[SCORES][:40]}), ["arrays differ in their number of rows", f"'{SCORES}': 40"]),
    "huge header": (huge_header, [f"key {GLOBALS} cannot be read", "its header says shape (1125899906842624, 19)"]),
    "long header": (long_header, [f"key {GLOBALS} cannot be read"]),
    "object array": (lambda rows: npz_bytes(rows | {GLOBALS: np.full((48, 19), None)}), [f"key {GLOBALS} has dtype object, expected numbers"]),
    "small board": (
        lambda rows: npz_bytes(rows | {PACKED: with_row(rows[PACKED], 21, 0x7F, 0, 0)}), [f"key {PACKED} row 21 has a board smaller than pos_len 9", "--allow-nonfull-mask"],
    ),
    "an empty file": (lambda rows: b"", ["cannot be read as an npz file"]),
    "a board size that is a bomb": (
        lambda rows: npz_bytes(rows | {"pos_len": np.zeros((5000, 5000), np.int8)}), ["key pos_len has shape (5000, 5000), expected one number, 9"],
    ),
    "another board": (lambda rows: npz_bytes(rows | {"pos_len": np.array(13)}), ["key pos_len says 13 but the run says 9", "--pos-len"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows48(rows9):
    """48 real rows by key, with an extra key that no trainer knows: it does not matter."""
    rows = {key: value[:48] for key, value in read(rows9 / "train" / "data1.npz").items()}
    return rows | {"comment": np.array("hello")}


@pytest.fixture
def data(tmp_path, rows9, rows48):
    """Two good files (a.npz and z.npz) of 48 rows and a validation file; a test adds its bad one."""
    folder = tmp_path / "data"
    for part in ("train", "val"):
        (folder / part).mkdir(parents=True)
        np.savez(folder / part / "a.npz", **{key: value[48:96] for key, value in read(rows9 / part / "data0.npz").items()})
    np.savez(folder / "train" / "z.npz", **rows48)
    return folder


@pytest.fixture
def trained_on(free, monkeypatch):  # noqa: F811
    """The scored rows (global inputs) of every step that was taken."""
    rows, plain = [], train_module.make_train_step

    def make_train_step(config):
        step = plain(config)

        def noting(state, batches):
            rows.extend(row.tobytes() for batch in batches for row in batch[GLOBALS])
            return step(state, batches)

        return noting

    monkeypatch.setattr(train_module, "make_train_step", make_train_step)
    return rows


def run(tmp_path, data, capsys, **options) -> tuple[int, str, str]:
    code = main(words_of(**SMALL | options, traindir=tmp_path / "run", datadir=data))
    return code, *capsys.readouterr()


QUICK = ("one flipped byte", "missing key", "nan target", "all-zero policy, no weight", "huge header")  # the others are long


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_a_bad_file_ends_the_run_in_one_line_after_saving_or_is_skipped(case, tmp_path, data, rows48, trained_on, capsys):
    make, named = CASES[case]
    bad = data / "train" / "m.npz"
    bad.write_bytes(make({key: value for key, value in rows48.items() if key != "pos_len"}))
    code, out, err = run(tmp_path, data, capsys)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and str(bad) in err
    for word in named:
        assert word in err
    # Where a header betrayed the file nothing was begun; else everything before it is saved.
    taken = len(trained_on) // 16
    saved = store.complete(tmp_path / "run" / store.FOLDER)
    assert [int(path.name) for path in saved[:1]] == ([taken] if taken else [])
    if taken:
        assert load_checkpoint(tmp_path / "run", Config(**SMALL)).samples == 16 * taken and f"stopped after step {taken}" in out
    # The same command with --skip-bad-files goes on; the file is told of once, counted and listed.
    code, out, err = run(tmp_path, data, capsys, skip_bad_files=True, max_training_samples=14 * 16, allow_changes="max_training_samples")
    assert code == 0 and err.count("skipped: ") == 1 and f"skipped: {bad}: " in err and f"skipped as bad: 1 ({bad})" in out
    assert len(trained_on) == 14 * 16, "14 steps: the epochs of two files have 6"
    good = {row.tobytes() for name in ("a.npz", "z.npz") for row in read(data / "train" / name)[GLOBALS]}
    assert set(trained_on) == good


@pytest.mark.parametrize("steps_per_jit", [1, 4])
def test_a_run_goes_on_where_it_was_once_the_bad_file_is_mended_or_gone(tmp_path, data, rows9, rows48, trained_on, capsys, steps_per_jit):
    """With four steps a call, a file that is bad may come when some of a call's batches are read already: they come again."""
    good = npz_bytes({key: value[96:144] for key, value in read(rows9 / "train" / "data0.npz").items()})
    bad, damaged = data / "train" / "m.npz", flip_a_byte(rows48)
    options = {"max_training_samples": 9 * 16, "seed": 3, "steps_per_jit": steps_per_jit}  # one epoch: three batches of each file
    bad.write_bytes(good)
    assert main(words_of(**SMALL | options, traindir=tmp_path / "whole", datadir=data)) == 0
    expected, own = trained_on.copy(), {row.tobytes() for row in read(bad)[GLOBALS]}
    assert expected[0] not in own and expected[-1] not in own, "it has to be the epoch's second file"
    trained_on.clear()

    bad.write_bytes(damaged)
    capsys.readouterr()
    assert run(tmp_path, data, capsys, **options)[0] == 2
    assert len(trained_on) == {1: 3, 4: 0}[steps_per_jit] * 16
    bad.write_bytes(good)
    assert run(tmp_path, data, capsys, **options)[0] == 0 and trained_on == expected, "as if the file had never been bad"
    trained_on.clear()

    (tmp_path / "run").rename(tmp_path / "mended")
    bad.write_bytes(damaged)
    assert run(tmp_path, data, capsys, **options)[0] == 2
    bad.unlink()
    assert run(tmp_path, data, capsys, **options)[0] == 0 and len(trained_on) == 9 * 16
    if steps_per_jit == 1:  # else nothing was saved, and a new order is drawn
        assert trained_on[: 6 * 16] == expected[: 3 * 16] + expected[6 * 16 :], "the rest of the epoch follows"


@pytest.mark.parametrize("pos_len", [13, 19])
def test_packed_rows_of_another_board_are_refused(tmp_path, rows19, rows9, pos_len, capsys):
    folder = rows9 if pos_len == 19 else rows19  # 46-byte rows with pos_len 13; 11-byte rows with 19
    code, _, err = run(tmp_path, folder, capsys, pos_len=pos_len)
    edge = {13: "(64, 22, 46), expected (N, 22, 22)", 19: "(192, 22, 11), expected (N, 22, 46)"}[pos_len]
    assert code == 2 and f"{PACKED} has shape {edge}: is --pos-len right?" in err and err.count("\n") == 1
    code, _, err = run(tmp_path, folder, capsys, pos_len=pos_len, skip_bad_files=True)
    assert code == 2 and "every file was skipped as bad" in err


def test_what_was_skipped_is_listed_also_after_a_restart(tmp_path, data, rows48, free, capsys):  # noqa: F811
    bad = data / "train" / "m.npz"
    bad.write_bytes(flip_a_byte(rows48))
    options = {"skip_bad_files": True, "seed": 3}  # the second file of the first epoch
    assert run(tmp_path, data, capsys, **options, max_training_samples=5 * 16)[0] == 0
    code, out, err = run(tmp_path, data, capsys, **options, max_training_samples=6 * 16, allow_changes="max_training_samples")
    assert (code, err) == (0, "") and f"skipped as bad: 1 ({bad})" in out


def test_a_validation_that_a_bad_file_interrupts_is_made_up_for(tmp_path, data, rows48, free, capsys, monkeypatch):  # noqa: F811
    """The file is whole when the run begins, and bad when it is read again."""
    path, options = data / "val" / "a.npz", {"val_every_samples": 48, "max_training_samples": 96}
    assert main(words_of(**SMALL | options, traindir=tmp_path / "whole", datadir=data)) == 0
    whole, plain = path.read_bytes(), train_module.make_train_step

    def make_train_step(config):
        step = plain(config)

        def spoiling(state, batches):
            if state.step == 5:
                path.write_bytes(flip_a_byte(rows48))
            return step(state, batches)

        return spoiling

    monkeypatch.setattr(train_module, "make_train_step", make_train_step)
    code, out, err = run(tmp_path, data, capsys, **options)
    assert code == 2 and str(path) in err and "stopped after step 6: saved in" in out
    path.write_bytes(whole)
    assert run(tmp_path, data, capsys, **options)[0] == 0
    assert logged(tmp_path / "run") == logged(tmp_path / "whole"), "the last validation too"


@pytest.mark.parametrize("place", ["train", "train/deep/run", "val/run"])
def test_a_run_folder_among_the_data_is_refused(tmp_path, data, place, capsys):
    """Its tapes would be taken for data."""
    assert main(words_of(**SMALL, traindir=data / place, datadir=data)) == 2
    assert "where every file is taken for data: give another --traindir" in capsys.readouterr().err


def test_files_of_few_rows_or_none_are_told_of_and_never_read(tmp_path, data, rows48, trained_on, capsys):
    for name, count in (("few.npz", 15), ("none.npz", 0)):
        np.savez(data / "train" / name, **{key: value[:count] for key, value in rows48.items() if value.ndim})
    code, _, err = run(tmp_path, data, capsys, max_training_samples=7 * 16)
    assert code == 0 and err.count("\n") == 1 and "2 of 4 files hold fewer rows than the 16 of a batch and are never read" in err
    assert "few.npz holds 15" in err and len(trained_on) == 7 * 16
    code, _, err = run(tmp_path, data, capsys, batch_size=64, max_training_samples=64)
    assert code == 2 and "no file holds the 64 rows of a batch (largest: " in err and "with 48 rows): use a smaller --batch-size" in err


def test_a_folder_without_files_is_named(tmp_path, data, capsys):
    for path in (data / "train").iterdir():
        path.unlink()
    code, _, err = run(tmp_path, data, capsys)
    assert code == 2 and f"{data / 'train'}: holds no npz files" in err and "--datadir" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "expected {\"files\": [...]}"),
        (b"\xff\xfe\x00", "expected {\"files\": [...]}"),
        (b"[1, 2]", "expected {\"files\": [...]}"),
        (b'{"files": "a.npz"}', "files is not a list"),
        (b"[" * 200_000, "expected {\"files\": [...]}"),
        (json.dumps({"files": ["../../outside.npz"]}).encode(), "entry '../../outside.npz' leads out of the folder"),
        (json.dumps({"files": [{"name": "sub/../../../outside.npz"}]}).encode(), "leads out of the folder"),
        (json.dumps({"files": ["gone.npz", "a\u0000b.npz", "x" * 5000 + ".npz"]}).encode(), "holds no npz files"),
    ],
)
def test_an_index_that_is_broken_or_leads_outside_is_refused(tmp_path, data, capsys, content, named):
    (data / "train" / "a.npz").rename(tmp_path / "outside.npz")
    (data / "train" / "z.npz").unlink()
    (data / "train" / "index.json").write_bytes(content)
    code, _, err = run(tmp_path, data, capsys)
    assert code == 2 and named in err and err.count("\n") == 1 and str(data / "train") in err


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "loop"])
def test_what_is_not_a_file_is_refused_and_never_waited_for(tmp_path, data, trained_on, kind, capsys):
    path = data / "train" / "m.npz"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "nowhere")
    code, _, err = run(tmp_path, data, capsys)
    assert code == 2 and str(path) in err and err.count("\n") == 1
    code, out, err = run(tmp_path, data, capsys, skip_bad_files=True)
    assert code == 0 and f"skipped as bad: 1 ({path})" in out


def test_a_file_that_may_not_be_read_is_named(data):
    path = data / "train" / "a.npz"
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # the superuser may read everything
    try:
        with pytest.raises(DataError, match="permission denied"):
            load_rows(path, 9)
    finally:
        os.seteuid(user)


def test_object_arrays_run_no_code(tmp_path, data, rows48, capsys):
    marker = tmp_path / "marker"
    np.savez(data / "train" / "m.npz", **rows48 | {GLOBALS: np.full((48, 19), RunsCode(marker), dtype=object)})
    code, _, err = run(tmp_path, data, capsys)
    assert code == 2 and "dtype object" in err and not marker.exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_flipped_byte_of_an_array_is_noticed_and_its_key_named(tmp_path, rows48, save):
    path = tmp_path / "rows.npz"
    save(path, **{key: value[:4] for key, value in rows48.items() if value.ndim})
    whole, rows = path.read_bytes(), load_rows(path, 9)
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.removesuffix(".npy") in (PACKED, GLOBALS, POLICY, TARGETS, SCORES, VALUES)]
    rng, harmless = np.random.default_rng(0), 0
    for entry in entries:
        start = entry.header_offset + 30 + len(entry.filename) + 20  # the entry's own header, with room for its extra field
        for place in rng.integers(start, start + entry.compress_size - 20, 40):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << rng.integers(8)
            path.write_bytes(damaged)
            try:
                found = load_rows(path, 9)
            except DataError as error:
                assert f"key {entry.filename.removesuffix('.npy')} " in str(error)
            else:  # a compressed stream can say the same in other bits
                harmless += 1
                assert all(np.array_equal(rows[key], found[key]) for key in rows)
    assert harmless == 0 if save is np.savez else harmless < 12, "of 240"


def test_rows_larger_than_the_machine_are_refused_before_they_are_read(tmp_path, rows48, monkeypatch):
    path = tmp_path / "rows.npz"
    np.savez(path, **rows48)
    plain = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else plain(name))
    with pytest.raises(DataError, match="split the file"):
        load_rows(path, 9)


def test_train_raises_what_main_prints(tmp_path, data, rows48, free):  # noqa: F811
    (data / "train" / "m.npz").write_bytes(CASES["nan target"][0](rows48))
    with pytest.raises(DataError, match="row 21 is not finite"):
        train(Config(**SMALL, traindir=tmp_path / "run", datadir=data), log=lambda line: None)
