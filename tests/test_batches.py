"""The batch stream against the specification's section 1, derived anew here with NumPy alone."""

import itertools
import json
import threading

import jax
import numpy as np
import pytest

from kgo_shard import augment
from kgo_shard.batches import check_files, draw_history, epoch_files, find_files, read_batches, read_packed_batches, read_validation
from kgo_shard.config import Config
from kgo_shard.npz import DataError, load_rows

KEYS = ("binaryInputNCHW", "globalInputNC", "policyTargetsNCMove", "globalTargetsNC", "scoreDistrN", "valueTargetsNCHW")
ALLOWED = {"xyt": range(8), "x": (0, 5), "xy": (0, 2, 5, 7), "x+y": (0, 2), "t": (0, 4)}

# Images of the last two axes (H, W), as the specification words them.
IMAGES = (
    lambda x: x,
    lambda x: np.flip(np.swapaxes(x, -1, -2), -2),  # transpose then flip H
    lambda x: np.flip(np.flip(x, -1), -2),  # flip W and H
    lambda x: np.flip(np.swapaxes(x, -1, -2), -1),  # transpose then flip W
    lambda x: np.swapaxes(x, -1, -2),  # transpose
    lambda x: np.flip(x, -1),  # flip W
    lambda x: np.flip(np.flip(np.swapaxes(x, -1, -2), -1), -2),  # transpose then flip W and H
    lambda x: np.flip(x, -2),  # flip H
)


expand = jax.jit(augment.expand, static_argnames="pos_len")


def history_matrices():
    base = np.diag(np.ones(22, np.float32))
    for plane in (9, 10, 11, 12, 13, 15, 16):
        base[plane, plane] = 0
    base[14, 15] = base[14, 16] = 1
    moves = np.zeros((5, 22, 22), np.float32)
    moves[0, 9, 9], moves[0, 14, 15], moves[0, 14, 16], moves[0, 15, 15], moves[0, 15, 16] = 1, -1, -1, 1, 1
    moves[1, 10, 10], moves[1, 15, 16], moves[1, 16, 16] = 1, -1, 1
    moves[2, 11, 11] = moves[3, 12, 12] = moves[4, 13, 13] = 1
    return base, moves


def image_of(batch, k, pos_len):
    area = pos_len * pos_len
    policy = batch["policyTargetsNCMove"].copy()
    boards = policy[..., :area].reshape(*policy.shape[:2], pos_len, pos_len)
    policy[..., :area] = IMAGES[k](boards).reshape(*policy.shape[:2], area)
    turned = {key: IMAGES[k](batch[key]) for key in ("binaryInputNCHW", "valueTargetsNCHW")}
    return batch | turned | {"policyTargetsNCMove": policy}


def specified_stream(files, batch_size, pos_len, symmetry, history, seed, drawn=None):
    """Section 1 of the specification. `drawn` collects the symmetries and the include rows."""
    rand = np.random.default_rng(seed)
    base, moves = history_matrices()
    num_read = batch_size // 8 if symmetry == "all" else batch_size
    for path in files:
        with np.load(path) as file:
            rows = {key: file[key] for key in file.files}
        bits = np.unpackbits(rows["binaryInputNCHWPacked"], axis=-1)[..., : pos_len * pos_len]
        rows["binaryInputNCHW"] = bits.reshape(-1, 22, pos_len, pos_len)
        rows["policyTargetsNCMove"] = rows["policyTargetsNCMove"][:, :2]
        for index in range(len(bits) // num_read):
            batch = {key: rows[key][index * num_read : (index + 1) * num_read].astype(np.float32) for key in KEYS}
            if history:
                stop = rand.random((num_read, 5)) >= 0.98
                include = (np.cumsum(stop, axis=1, dtype=np.float32) <= 0.1).astype(np.float32)
                matrix = base + np.einsum("ni,ijl->njl", include, moves)
                batch["binaryInputNCHW"] = np.einsum("nihw,nil->nlhw", batch["binaryInputNCHW"], matrix)
                batch["globalInputNC"] = batch["globalInputNC"] * np.concatenate([include, np.ones((num_read, 14), np.float32)], axis=1)
            k = None
            if symmetry == "all":
                images = [image_of(batch, k, pos_len) for k in range(8)]
                batch = {key: np.concatenate([image[key] for image in images]) for key in KEYS}
            elif symmetry != "none":
                k = ALLOWED[symmetry][rand.integers(0, len(ALLOWED[symmetry]))]
                batch = image_of(batch, k, pos_len)
            if drawn is not None:
                drawn.append((k, include if history else None))
            yield batch


def assert_same_batches(got, expected):
    pairs = list(itertools.zip_longest(got, expected))
    assert pairs
    for number, (batch, wanted) in enumerate(pairs):
        assert batch is not None and wanted is not None, f"one stream ends before batch {number}"
        assert set(batch) == set(wanted) == set(KEYS)
        for key in KEYS:
            np.testing.assert_array_equal(batch[key], wanted[key], err_msg=f"batch {number}, {key}")


def make_config(**options):
    return Config(**{"pos_len": 9, "batch_size": 16, "symmetry_type": "none"} | options)


@pytest.fixture(scope="module")
def files9(rows9):
    return sorted((rows9 / "train").glob("*.npz"))


@pytest.fixture(scope="module")
def stamped(tmp_path_factory, rows9):
    """Writes a file of N rows whose global input 18 counts up from `first`; the rest are real rows."""
    with np.load(rows9 / "train" / "data0.npz") as file:
        rows = {key: file[key] for key in file.files}

    def write(folder, name, num_rows, first=0):
        part = {key: value[:num_rows].copy() for key, value in rows.items()}
        part["globalInputNC"][:, 18] = first + np.arange(num_rows)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / name, **part)
        return folder / name

    return write


def stamps(batches):
    return [batch["globalInputNC"][:, 18].astype(int).tolist() for batch in batches]


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("symmetry", ["xyt", "x", "xy", "x+y", "t", "none", "all"])
def test_the_stream_is_the_specifications(files9, symmetry, history):
    drawn = []
    expected = specified_stream(files9, 16, 9, symmetry, history, 1, drawn)
    config = make_config(symmetry_type=symmetry, enable_history_matrices=history)
    assert_same_batches(read_batches(files9, config, 1), expected)
    # With this seed the rows exercise every image and history that ends at every move.
    assert {k for k, _ in drawn} == set(ALLOWED.get(symmetry, [None]))
    if history and symmetry != "all":
        assert {tuple(row) for _, include in drawn for row in include} == {(1.0,) * i + (0.0,) * (5 - i) for i in range(6)}


def test_the_stream_of_large_boards_is_the_specifications(rows19):
    files = sorted((rows19 / "train").glob("*.npz"))
    config = make_config(pos_len=19, symmetry_type="xyt", enable_history_matrices=True)
    assert_same_batches(read_batches(files, config, 7), specified_stream(files, 16, 19, "xyt", True, 7))


def test_history_is_drawn_before_the_symmetry_and_the_seed_counts(files9):
    config = make_config(symmetry_type="xyt", enable_history_matrices=True)
    rand = np.random.default_rng(5)
    for batch in read_packed_batches(files9, config, 5):
        np.testing.assert_array_equal(batch["historyInclude"], draw_history(rand, 16))
        np.testing.assert_array_equal(batch["symmetry"], np.full(16, rand.integers(0, 8)))
    other = np.concatenate([batch["symmetry"] for batch in read_packed_batches(files9, config, 6)])
    assert (other != np.concatenate([batch["symmetry"] for batch in read_packed_batches(files9, config, 5)])).any()


def test_a_draw_of_exactly_the_threshold_stops_the_history():
    class Draws:
        def random(self, shape):
            return np.array([[0.98, 0, 0, 0, 0], [0, 0.98, 0, 0, 0], [np.nextafter(0.98, 0)] * 5, [0, 0, 0, 0, 1]])

    expected = [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    include = draw_history(Draws(), 4)
    assert include.dtype == np.float32
    np.testing.assert_array_equal(include, expected)


def test_rows_come_in_order_and_each_files_remainder_is_dropped(tmp_path, stamped):
    files = [stamped(tmp_path, "b.npz", 37), stamped(tmp_path, "a.npz", 5, 100), stamped(tmp_path, "c.npz", 16, 200)]
    batches = list(read_packed_batches(files, make_config(), 1))
    # In the order given, not sorted; floor(37/16), floor(5/16) and floor(16/16) batches.
    assert stamps(batches) == [list(range(16)), list(range(16, 32)), list(range(200, 216))]


def test_the_next_file_is_read_while_one_is_trained_on_and_no_other(tmp_path, stamped, monkeypatch):
    files = [stamped(tmp_path, f"{i}.npz", 40) for i in range(3)]
    read, second_is_read = [], threading.Event()

    def load(path, *options):
        rows = load_rows(path, *options)
        read.append(path)
        if path == files[1]:
            second_is_read.set()
        return rows

    monkeypatch.setattr("kgo_shard.batches.load_rows", load)
    stream = read_packed_batches(files, Config(pos_len=9, batch_size=16), 0)
    next(stream)
    assert second_is_read.wait(20) and read == files[:2]
    assert [len(batch[KEYS[1]]) for batch in stream] == [16] * 5 and read == files


def test_all_reads_an_eighth_of_the_rows_and_emits_eight_images(tmp_path, stamped):
    batches = list(read_packed_batches([stamped(tmp_path, "a.npz", 5)], make_config(symmetry_type="all"), 1))
    assert stamps(batches) == [[0, 1] * 8, [2, 3] * 8]
    np.testing.assert_array_equal(batches[0]["symmetry"], np.repeat(np.arange(8), 2))


def test_files_without_a_whole_batch_end_the_stream_with_an_error(tmp_path, stamped):
    files = [stamped(tmp_path, "a.npz", 12), stamped(tmp_path, "b.npz", 15)]
    with pytest.raises(DataError, match=r"no file holds the 16 rows of a batch \(largest: .*b\.npz with 15 rows\).*--batch-size"):
        list(read_packed_batches(files, make_config(), 1))
    with pytest.raises(DataError, match="2 rows of a batch"):
        list(read_packed_batches([stamped(tmp_path, "c.npz", 1)], make_config(symmetry_type="all"), 1))
    with pytest.raises(DataError, match="no file holds"):
        list(read_packed_batches([], make_config(), 1))


def test_read_batches_are_the_packed_ones_expanded(files9):
    config = make_config(symmetry_type="xyt", enable_history_matrices=True)
    packed = read_packed_batches(files9, config, 3)
    for batch, stored in itertools.islice(zip(read_batches(files9, config, 3), packed, strict=True), 4):
        expanded = expand(stored, pos_len=9)
        for key in KEYS:
            assert batch[key].tobytes() == np.asarray(expanded[key]).tobytes(), key


def test_read_batches_are_contiguous_float32_host_arrays(files9):
    for options in ({}, {"symmetry_type": "xyt", "enable_history_matrices": True}, {"symmetry_type": "all"}):
        batch = next(read_batches(files9, make_config(**options), 1))
        assert tuple(sorted(batch)) == tuple(sorted(KEYS))
        for key, value in batch.items():
            assert type(value) is np.ndarray and value.dtype == np.float32 and value.flags["C_CONTIGUOUS"] and value.flags["WRITEABLE"], key
            assert len(value) == 16


def test_packed_batches_keep_the_stored_dtypes(files9):
    batch = next(read_packed_batches(files9, make_config(symmetry_type="x", enable_history_matrices=True), 1))
    assert {key: str(value.dtype) for key, value in batch.items()} == {
        "binaryInputNCHWPacked": "uint8",
        "globalInputNC": "float32",
        "policyTargetsNCMove": "int16",
        "globalTargetsNC": "float32",
        "scoreDistrN": "int8",
        "valueTargetsNCHW": "int8",
        "historyInclude": "float32",
        "symmetry": "int32",
    }
    plain = next(read_packed_batches(files9, make_config(), 1))
    assert "historyInclude" not in plain and "symmetry" not in plain


def test_unpacked_files_give_the_same_stream(tmp_path, files9):
    with np.load(files9[0]) as file:
        rows = {key: file[key] for key in file.files}
    rows["binaryInputNCHW"] = np.unpackbits(rows.pop("binaryInputNCHWPacked"), axis=-1, count=81).reshape(-1, 22, 9, 9)
    np.savez(tmp_path / "unpacked.npz", pos_len=9, **rows)
    config = make_config(symmetry_type="xyt", enable_history_matrices=True)
    assert_same_batches(read_batches([tmp_path / "unpacked.npz"], config, 2), read_batches(files9[:1], config, 2))


def test_epoch_order_is_the_seeds_shuffle_of_the_sorted_files(tmp_path):
    files = [tmp_path / f"{letter}.npz" for letter in "hgfedcba"]
    expected = sorted(files)
    np.random.default_rng(77).shuffle(expected)
    assert epoch_files(files, 77) == expected != sorted(files)
    assert files == [tmp_path / f"{letter}.npz" for letter in "hgfedcba"], "the caller's list was shuffled"


@pytest.mark.parametrize(("max_val_batches", "count"), [(0, 6), (2, 2), (6, 6), (16, 6)])
def test_validation_has_its_own_seed_no_symmetry_and_at_most_so_many_batches(rows9, max_val_batches, count):
    files = find_files(rows9 / "val")
    config = make_config(symmetry_type="xyt", enable_history_matrices=True, max_val_batches=max_val_batches, seed=11)
    packed = list(read_validation(files, config, 480))
    assert len(packed) == count and all("symmetry" not in batch for batch in packed)
    expected = specified_stream(files, 16, 9, "none", True, 11 + 480 + 999983)
    assert_same_batches((expand(batch, pos_len=9) for batch in packed), itertools.islice(expected, count))


def test_files_of_a_folder_are_its_sorted_npz_files(tmp_path):
    for name in ("b.npz", "a.npz", "deep/c.npz", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "index.json").write_text('{"files": ["deep/c.npz"]}')  # not read where npz files lie in the folder itself
    assert find_files(tmp_path) == [tmp_path / "a.npz", tmp_path / "b.npz"]


def test_an_index_may_name_files_in_every_form(tmp_path):
    names = ("one/z.npz", "two/y.npz", "two/x.npz", "two/w.npz", "three/v.npz", "three/not-named.npz", "three/u.txt")
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    elsewhere = tmp_path / "elsewhere.npz"
    elsewhere.touch()
    entries = [
        "one/z.npz",
        {"name": "two/y.npz"},
        {"path": "two/x.npz", "rows": 7},
        {"file": "two/w.npz"},
        {"filename": "three/v.npz"},
        str(elsewhere),
        "three/u.txt",
        "gone.npz",
        {"rows": 7},
        None,
    ]
    (tmp_path / "data" / "index.json").write_text(json.dumps({"files": entries}))
    expected = [elsewhere, *(tmp_path / "data" / name for name in ("one/z.npz", "two/y.npz", "two/x.npz", "two/w.npz", "three/v.npz"))]
    assert find_files(tmp_path / "data") == sorted(expected)


def test_without_files_or_a_useful_index_deeper_folders_are_searched(tmp_path):
    for name in ("b/2.npz", "a/deep/3.npz", "a/1.npz", "a-b/4.npz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    # As text "a-b/" comes before "a/"; as paths it would come after.
    expected = [tmp_path / "a-b/4.npz", tmp_path / "a/1.npz", tmp_path / "a/deep/3.npz", tmp_path / "b/2.npz"]
    assert find_files(tmp_path) == expected
    (tmp_path / "index.json").write_text('{"files": ["gone.npz"]}')
    assert find_files(tmp_path) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"files"', '{"files": "a.npz"}', "\xff"])
def test_a_broken_index_is_named(tmp_path, text):
    (tmp_path / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match="index.json"):
        find_files(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such folder"):
        find_files(tmp_path / "nowhere")


def test_files_are_checked_before_a_run_by_their_headers(tmp_path, stamped):
    folder = tmp_path / "data"
    with pytest.raises(DataError, match="data: no such folder"):
        check_files(folder, make_config(), 16)
    folder.mkdir()
    with pytest.raises(DataError, match="data: holds no npz files"):
        check_files(folder, make_config(), 16)
    small, large = stamped(folder, "a.npz", 12), stamped(folder, "b.npz", 15)
    with pytest.raises(DataError, match=r"no file holds the 16 rows of a batch \(largest: .*b\.npz with 15 rows\)"):
        check_files(folder, make_config(), 16)
    assert check_files(folder, make_config(), 15) == [small, large]
    with pytest.raises(DataError, match="a.npz.*--pos-len"):
        check_files(folder, make_config(pos_len=19), 15)
