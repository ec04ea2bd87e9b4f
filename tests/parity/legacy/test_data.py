"""The batch stream against straightforward formulas, and every refusal of bad files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import legacy_pmap as stack

from .helpers import DATA, FILES, first_batches, small_config

PLAIN = dict(symmetry_type="none")


def stored(path):
    with np.load(path) as archive:
        return {key: archive[key] for key in archive.files}


def write(path, arrays):
    np.savez(path, **arrays)
    return str(path)


def board_symmetry(board, k):
    """The spec's list, one board at a time: boards are (H, W)."""
    flip_h, flip_w = (lambda x: x[::-1, :]), (lambda x: x[:, ::-1])
    return {0: lambda x: x, 1: lambda x: flip_h(x.T), 2: lambda x: flip_h(flip_w(x)), 3: lambda x: flip_w(x.T), 4: lambda x: x.T,
            5: flip_w, 6: lambda x: flip_h(flip_w(x.T)), 7: flip_h}[k](board)


def transformed(batch, k, size=9):
    out = {key: array.copy() for key, array in batch.items()}
    for n in range(len(batch["globalInputNC"])):
        for key in ("binaryInputNCHW", "valueTargetsNCHW"):
            for c in range(batch[key].shape[1]):
                out[key][n, c] = board_symmetry(batch[key][n, c], k)
        for c in range(2):
            out["policyTargetsNCMove"][n, c, :-1] = board_symmetry(batch["policyTargetsNCMove"][n, c, :-1].reshape(size, size), k).ravel()
    return out


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert b[key].dtype == np.float32 and b[key].flags.c_contiguous
        assert np.array_equal(a[key], b[key]), key


def test_rows_are_consecutive_and_remainders_dropped():
    config = small_config(batch_size=80, **PLAIN)
    batches = list(stack.read_batches(FILES, config, 0))
    assert len(batches) == sum(len(stored(path)["globalInputNC"]) // 80 for path in FILES)
    first = stored(FILES[0])
    assert np.array_equal(batches[1]["globalTargetsNC"], first["globalTargetsNC"][80:160])
    assert batches[0]["binaryInputNCHW"].shape == (80, 22, 9, 9)
    bit = 3 * 9 + 4  # row 3, column 4
    packed = first["binaryInputNCHWPacked"][:80, :, bit // 8] >> (7 - bit % 8) & 1
    assert np.array_equal(batches[0]["binaryInputNCHW"][:, :, 3, 4], packed)


@pytest.mark.parametrize("kind, allowed", [("xyt", range(8)), ("x", (0, 5)), ("xy", (0, 2, 5, 7)), ("x+y", (0, 2)), ("t", (0, 4))])
def test_symmetries(kind, allowed):
    plain = first_batches(small_config(**PLAIN), 6)
    drawn = np.random.default_rng(5)
    for before, after in zip(plain, first_batches(small_config(symmetry_type=kind), 6)):
        assert_equal(transformed(before, list(allowed)[drawn.integers(0, len(allowed))]), after)


def test_all_symmetries_concatenates_the_eight_images():
    [images] = first_batches(small_config(symmetry_type="all", batch_size=32), 1)
    [plain] = first_batches(small_config(batch_size=4, **PLAIN), 1)
    eight = [transformed(plain, k) for k in range(8)]
    assert_equal({key: np.concatenate([image[key] for image in eight]) for key in plain}, images)


def test_history_drops_moves_from_the_stop_on():
    plain = first_batches(small_config(**PLAIN), 12)
    kept = first_batches(small_config(enable_history_matrices=True, **PLAIN), 12)
    drawn, stopped = np.random.default_rng(5), 0
    for before, after in zip(plain, kept):
        r = drawn.random((16, 5))
        expected = {key: array.copy() for key, array in before.items()}
        for n in range(16):
            stops = np.flatnonzero(r[n] >= 0.98)
            moves = int(stops[0]) if len(stops) else 5  # that many last moves stay
            stopped += moves < 5
            planes, old = expected["binaryInputNCHW"][n], before["binaryInputNCHW"][n]
            planes[9 + moves : 14] = 0.0
            # Ladder planes of one and two moves ago fall back to the newest that is still known.
            planes[15] = old[15] if moves >= 1 else old[14]
            planes[16] = old[16] if moves >= 2 else old[15] if moves == 1 else old[14]
            expected["globalInputNC"][n, moves:5] = 0.0
        assert_equal(expected, after)
    assert stopped > 3


def test_unpacked_planes_equal_packed_ones(tmp_path):
    arrays = stored(FILES[0])
    planes = np.unpackbits(arrays.pop("binaryInputNCHWPacked"), axis=-1)[..., :81].reshape(-1, 22, 9, 9)
    path = write(tmp_path / "a.npz", {**arrays, "binaryInputNCHW": planes, "pos_len": np.int32(9)})
    config = small_config()
    for a, b in zip(stack.read_batches(FILES[:1], config, 3), stack.read_batches([path], config, 3)):
        assert_equal(a, b)


def test_extra_policy_rows_are_ignored(tmp_path):
    arrays = stored(FILES[0])
    policy = arrays["policyTargetsNCMove"]
    path = write(tmp_path / "a.npz", {**arrays, "policyTargetsNCMove": np.concatenate([policy, policy], axis=1)})
    config = small_config()
    assert_equal(next(stack.read_batches(FILES[:1], config, 3)), next(stack.read_batches([path], config, 3)))


def test_layouts(tmp_path):
    nested = tmp_path / "nested" / "deep"
    nested.mkdir(parents=True)
    for name in ("b.npz", "a.npz"):
        shutil.copy(FILES[0], nested / name)
    assert stack.list_files(tmp_path) == [str(nested / "a.npz"), str(nested / "b.npz")]
    entries = [{"path": "nested/deep/b.npz"}, "nested/deep/gone.npz", str(nested / "a.npz"), {"filename": "nested/deep/b.txt"}, {"rows": 7}, None]
    (tmp_path / "index.json").write_text(json.dumps({"files": entries}))
    assert stack.list_files(tmp_path) == [str(nested / "a.npz"), str(nested / "b.npz")]
    (tmp_path / "index.json").write_text(json.dumps({"files": entries[:1]}))
    assert stack.list_files(tmp_path) == [str(nested / "b.npz")]
    shutil.copy(FILES[0], tmp_path / "z.npz")
    assert stack.list_files(tmp_path) == [str(tmp_path / "z.npz")]


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(stack.DataError, match="no such folder"):
        stack.list_files(tmp_path / "gone")
    with pytest.raises(stack.DataError, match="no .npz"):
        stack.list_files(tmp_path)
    for text in ("{", "[]", '{"files": "a.npz"}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(stack.DataError, match="index.json"):
            stack.list_files(tmp_path)


def bad_file(kind, path):
    arrays = stored(FILES[0])
    if kind == "truncated":
        data = Path(FILES[0]).read_bytes()
        path.write_bytes(data[: len(data) // 2])
        return str(path)
    if kind == "empty":
        path.write_bytes(b"")
        return str(path)
    if kind == "array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
        return str(path)
    if kind == "missing":
        del arrays["scoreDistrN"]
    if kind == "planes":
        del arrays["binaryInputNCHWPacked"]
    if kind == "stated":
        arrays["pos_len"] = np.int64(13)
    if kind == "rows":
        arrays["globalInputNC"] = arrays["globalInputNC"][:-1]
    if kind == "objects":
        arrays["globalInputNC"] = arrays["globalInputNC"].astype(object)
    if kind == "text":
        arrays["globalInputNC"] = arrays["globalInputNC"].astype("U8")
    return write(path, arrays)


@pytest.mark.parametrize("kind, word", [
    ("truncated", "truncated"), ("empty", "readable"), ("array", "named arrays"), ("missing", "scoreDistrN"),
    ("planes", "binaryInputNCHWPacked"), ("stated", "13"), ("rows", "globalInputNC"), ("objects", "globalInputNC"), ("text", "globalInputNC")])
def test_bad_files_are_refused(tmp_path, kind, word):
    path = bad_file(kind, tmp_path / "bad.npz")
    with pytest.raises(stack.DataError) as error:
        next(stack.read_batches([path], small_config(), 0))
    assert path in str(error.value) and word in str(error.value) and "\n" not in str(error.value)


def test_wrong_pos_len_is_refused():
    with pytest.raises(stack.DataError, match="pos_len=19"):
        next(stack.read_batches(FILES, small_config(pos_len=19), 0))


def test_no_file_with_a_batch_is_refused():
    with pytest.raises(stack.DataError, match="4096 rows"):
        list(stack.read_batches(FILES, small_config(batch_size=4096), 0))


def test_sample_is_there():
    assert len(FILES) >= 2 and stack.list_files(DATA / "val")
