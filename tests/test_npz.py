"""Loading rows: real files load, and every refusal names file, key and row."""

import io
import os
import threading
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgo_shard.npz import DataError, count_rows, load_rows

PACKED, PLANES = "binaryInputNCHWPacked", "binaryInputNCHW"
POLICY, TARGETS, SCORES, VALUES, GLOBALS = "policyTargetsNCMove", "globalTargetsNC", "scoreDistrN", "valueTargetsNCHW", "globalInputNC"
USED = (PACKED, GLOBALS, POLICY, TARGETS, SCORES, VALUES)


def read(path):
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


@pytest.fixture(scope="module")
def six_rows(rows9):
    """The first six real rows of a file, by key."""
    return {key: value[:6] for key, value in read(rows9 / "train" / "data0.npz").items() if key in USED}


@pytest.fixture
def write(tmp_path, six_rows):
    """Writes the six rows with some arrays changed (None: left out) and returns the path."""

    def write(**changes):
        path = tmp_path / "rows.npz"
        np.savez(path, **{key: value for key, value in (six_rows | changes).items() if value is not None})
        return path

    return write


def refusal(path, pos_len=9) -> str:
    with pytest.raises(DataError) as error:
        load_rows(path, pos_len)
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize(("board", "pos_len", "num_rows"), [("rows9", 9, 192), ("rows19", 19, 64)])
def test_real_rows_load_as_they_are_stored(board, pos_len, num_rows, request):
    path = request.getfixturevalue(board) / "train" / "data0.npz"
    rows, stored = load_rows(path, pos_len), read(path)
    assert tuple(rows) == USED
    for key, value in rows.items():
        assert value.dtype == stored[key].dtype and len(value) == num_rows
        np.testing.assert_array_equal(value, stored[key])


def test_only_the_two_policy_rows_in_use_are_kept(write, six_rows):
    # KataGo writes more; what stands in them is not looked at.
    extra = np.zeros_like(six_rows[POLICY])
    rows = load_rows(write(**{POLICY: np.concatenate([six_rows[POLICY], extra], axis=1)}), 9)
    np.testing.assert_array_equal(rows[POLICY], six_rows[POLICY])


@pytest.mark.parametrize("dtype", [np.uint8, bool, np.float32])
def test_unpacked_planes_are_accepted(write, six_rows, dtype):
    planes = np.unpackbits(six_rows[PACKED], axis=-1, count=81).reshape(6, 22, 9, 9).astype(dtype)
    rows = load_rows(write(**{PACKED: None, PLANES: planes, "pos_len": np.array(9)}), 9)
    assert tuple(rows) == (PLANES, *USED[1:])
    np.testing.assert_array_equal(rows[PLANES], planes)


def test_arrays_that_were_stored_column_by_column_have_the_same_numbers(write, six_rows):
    rows = load_rows(write(**{key: np.asfortranarray(value) for key, value in six_rows.items()}), 9)
    for key, value in rows.items():
        np.testing.assert_array_equal(value, six_rows[key])


def test_an_archive_is_read_by_one_thread_alone(write, monkeypatch):
    """Since Python 3.12 two threads that open entries of one ZipFile can read each other's bytes."""
    threads, opened = set(), zipfile.ZipFile.open
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *arguments, **more: threads.add(threading.get_ident()) or opened(*arguments, **more))
    load_rows(write(), 9)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_every_compression_holds_the_same_rows_and_a_checksum(tmp_path, write, method):
    plain = write()
    expected, path = load_rows(plain, 9), tmp_path / "packed.npz"
    with zipfile.ZipFile(plain) as stored, zipfile.ZipFile(path, "w", method) as packed:
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    for key, value in load_rows(path, 9).items():
        np.testing.assert_array_equal(value, expected[key])
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as packed:
        checksum = packed.getinfo(f"{VALUES}.npy").CRC.to_bytes(4, "little")
    path.write_bytes(whole.replace(checksum, bytes(4)))
    assert VALUES in refusal(path)


def test_targets_may_have_more_or_just_enough_columns(write, six_rows):
    assert load_rows(write(**{TARGETS: six_rows[TARGETS][:, :41]}), 9)[TARGETS].shape == (6, 41)
    assert load_rows(write(), 9)[TARGETS].shape == (6, 80)
    assert TARGETS in refusal(write(**{TARGETS: six_rows[TARGETS][:, :40]}))


def test_a_missing_file_is_named(tmp_path):
    assert "no such file" in refusal(tmp_path / "nothing.npz")


@pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_truncated_file_is_refused(tmp_path, six_rows, save, part):
    path = tmp_path / "cut.npz"
    save(path, **six_rows)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    assert "damaged" in refusal(path)
    path.write_bytes(whole[:-1])
    assert "damaged" in refusal(path)
    path.write_bytes(whole)
    load_rows(path, 9)


def test_a_file_of_something_else_is_refused(tmp_path, six_rows):
    path = tmp_path / "other.npz"
    path.write_text("not an npz")
    refusal(path)
    with open(path, "wb") as file:
        np.save(file, six_rows[GLOBALS])
    refusal(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello.txt", "hello")
    assert PLANES in refusal(path)


@pytest.mark.parametrize("key", USED)
def test_a_missing_key_is_named(write, key):
    assert f"key {PLANES} (nor {PACKED})" if key == PACKED else f"key {key} is missing" in refusal(write(**{key: None}))


@pytest.mark.parametrize(("board", "pos_len"), [("rows19", 9), ("rows9", 19)])
def test_rows_of_another_board_are_refused(board, pos_len, request):
    path = request.getfixturevalue(board) / "train" / "data0.npz"
    message = refusal(path, pos_len)
    edge = {"rows9": 11, "rows19": 46}
    assert PACKED in message and f"(N, 22, {(pos_len * pos_len + 7) // 8})" in message and str(edge[board]) in message
    assert "--pos-len" in message


@pytest.mark.parametrize("said", [np.array(19), np.array([19]), np.array([9, 9]), np.array("nine"), np.array(9.5), np.array(np.nan), np.zeros(0)])
def test_a_pos_len_that_disagrees_is_refused(write, said):
    message = refusal(write(pos_len=said))
    assert "key pos_len" in message and ("9" in message or "dtype <U4, expected numbers" in message)


def test_a_pos_len_that_agrees_is_accepted(write):
    for said in (np.array(9), np.array([9]), np.array(9.0)):
        load_rows(write(pos_len=said), 9)


@pytest.mark.parametrize("key", [GLOBALS, TARGETS, SCORES, VALUES, POLICY])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_key_and_row(write, six_rows, key, value):
    array = six_rows[key].astype(np.float32)
    array[(4, *[-1] * (array.ndim - 1))] = value
    assert f"key {key} row 4 is not finite (1 such rows)" in refusal(write(**{key: array}))


@pytest.mark.parametrize("which", [0, 1])
def test_an_all_zero_policy_row_is_named(write, six_rows, which):
    policy = six_rows[POLICY].copy()
    policy[2:4, which] = 0
    assert f"key {POLICY} row 2 policy {which} is all zero or negative (2 such rows)" in refusal(write(**{POLICY: policy}))
    assert f"row 2 policy {which}" in refusal(write(**{POLICY: policy.astype(np.float32)}))


def test_negative_visit_counts_are_refused_also_where_the_sum_is_positive(write, six_rows):
    policy = six_rows[POLICY].copy()
    policy[5, 1, 7] = -1
    assert policy[5, 1].sum() > 0 and f"key {POLICY} row 5 policy 1" in refusal(write(**{POLICY: policy}))


def test_a_single_visit_is_enough(write, six_rows):
    policy = np.zeros_like(six_rows[POLICY])
    policy[:, :, 3] = 1
    load_rows(write(**{POLICY: policy}), 9)


def test_policies_whose_int16_sum_overflows_are_not_taken_for_zero(write, six_rows):
    policy = six_rows[POLICY].copy()
    policy[0, 0] = 0
    policy[0, 0, :4] = 16384  # the sum is 2**16, which is 0 in 16 bits
    load_rows(write(**{POLICY: policy}), 9)


@pytest.mark.parametrize(
    ("key", "dtype"),
    [(PACKED, np.int8), (PACKED, np.float32), (GLOBALS, np.complex64), (VALUES, "U4"), (SCORES, "S2"), (POLICY, "m8[s]"), (POLICY, "M8[s]")],
)
def test_a_wrong_dtype_is_named(write, six_rows, key, dtype):
    with np.errstate(all="ignore"):
        array = six_rows[key].astype(np.int64).astype(dtype) if np.dtype(dtype).kind in "mM" else six_rows[key].astype(dtype)
    message = refusal(write(**{key: array}))
    assert f"key {key} has dtype {array.dtype}" in message


@pytest.mark.parametrize("key", USED)
def test_an_array_of_another_shape_is_named(write, six_rows, key):
    array = six_rows[key]
    wrong = [array[..., :8], array[..., None], array.reshape(-1), array[None], array.reshape(-1)[0]]
    for value in wrong:
        assert f"key {key} has shape {value.shape}" in refusal(write(**{key: value}))


@pytest.mark.parametrize("key", USED[1:])
def test_arrays_of_different_lengths_are_refused_with_their_lengths(write, six_rows, key):
    message = refusal(write(**{key: six_rows[key][:5]}))
    assert "differ in their number of rows" in message and f"'{key}': 5" in message and "6" in message


def test_a_file_without_rows_loads_as_none(write, six_rows):
    rows = load_rows(write(**{key: value[:0] for key, value in six_rows.items()}), 9)
    assert {len(value) for value in rows.values()} == {0}


class RunsCode:
    """What an evil file holds: unpickling it creates the file `marker`."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("key", [GLOBALS, "pos_len"])
def test_object_arrays_are_never_unpickled(write, tmp_path, key):
    marker = tmp_path / "marker"
    path = write(**{key: np.array([RunsCode(marker)] * 6, dtype=object)})
    assert f"key {key} has dtype object, expected numbers" in refusal(path)
    assert not marker.exists()
    with np.load(path, allow_pickle=True) as file:
        file[key]
    assert marker.exists(), "the file was not as evil as this test needs"


def test_keys_that_training_does_not_read_may_hold_anything(write, tmp_path):
    marker = tmp_path / "marker"
    load_rows(write(note=np.array(RunsCode(marker), dtype=object)), 9)
    assert not marker.exists()


@pytest.fixture(scope="module")
def small_files(six_rows):
    """The bytes of a plain and of a compressed file of two rows."""
    files = []
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, pos_len=np.array(9), **{key: value[:2] for key, value in six_rows.items()})
        files.append(buffer.getvalue())
    return files


@settings(max_examples=600, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_a_damaged_file_loads_or_raises_data_error_and_nothing_else(data, small_files, tmp_path_factory):
    damaged = bytearray(data.draw(st.sampled_from(small_files)))
    # Headers decide what happens, so most of the flips go there: local ones, and the directory at the end.
    ends = st.one_of(st.integers(0, 400), st.integers(len(damaged) - 1200, len(damaged) - 1), st.integers(0, len(damaged) - 1))
    for place in data.draw(st.lists(ends, max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(damaged[:cut])
    try:
        rows = load_rows(path, 9)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert {len(value) for value in rows.values()} == {2}
    try:
        count_rows(path, 9)
    except DataError as error:
        assert str(path) in str(error)


# The look at the headers before a run


@pytest.mark.parametrize(("board", "pos_len", "num_rows"), [("rows9", 9, 192), ("rows19", 19, 64)])
def test_rows_are_counted_from_the_headers(board, pos_len, num_rows, request):
    assert count_rows(request.getfixturevalue(board) / "train" / "data0.npz", pos_len) == num_rows


def test_whatever_loads_is_counted(write, six_rows):
    planes = np.unpackbits(six_rows[PACKED], axis=-1, count=81).reshape(6, 22, 9, 9)
    extra = np.concatenate([six_rows[POLICY]] * 2, axis=1)
    for changes in ({}, {PACKED: None, PLANES: planes}, {POLICY: extra}, {"pos_len": np.array(9), "note": np.array("hello")}):
        path = write(**changes)
        assert count_rows(path, 9) == len(load_rows(path, 9)[TARGETS]) == 6


@pytest.mark.parametrize("key", USED)
def test_headers_that_do_not_fit_are_refused_as_the_rows_are(write, six_rows, key):
    for value in (None, six_rows[key][..., :8], six_rows[key][None], six_rows[key].reshape(-1)):
        path = write(**{key: value})
        with pytest.raises(DataError) as error:
            count_rows(path, 9)
        assert str(error.value) == refusal(path)


def test_files_whose_headers_cannot_be_read_are_refused(tmp_path, write):
    path = write()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="damaged"):
        count_rows(path, 9)
    with pytest.raises(DataError, match="no such file"):
        count_rows(tmp_path / "nothing.npz", 9)


def test_headers_of_object_arrays_run_nothing(write, tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(DataError, match=f"key {GLOBALS} has dtype object"):
        count_rows(write(**{GLOBALS: np.full((6, 19), RunsCode(marker), dtype=object)}), 9)
    assert not marker.exists()
