"""One npz file -> validated host arrays, or an error that names the file, the key and the row."""

import zipfile
from pathlib import Path

import numpy as np

from . import layout


class DataError(ValueError):
    """Data that cannot be trained on; the message names file, key and row, and what to do."""


def load_rows(path: str | Path, pos_len: int) -> dict[str, np.ndarray]:
    """Read one file of self-play rows.

    Returns the six arrays that training reads, in their stored dtypes, rows first: the planes packed
    (`binaryInputNCHWPacked`) or not (`binaryInputNCHW`), whichever the file has, and only the two policy rows in use. Raises DataError.
    """
    path = Path(path)
    arrays = _read(path)
    shapes = layout.row_shapes(pos_len)
    planes_key = layout.PACKED if layout.PACKED in arrays else layout.PLANES
    saved = arrays.get("pos_len", np.array(pos_len))
    if saved.size != 1 or saved.item() != pos_len:
        raise DataError(f"{path}: the file says pos_len {saved.tolist()} but the run says {pos_len}: change --pos-len")
    wanted = [planes_key, layout.GLOBALS, layout.POLICY, layout.TARGETS, layout.SCORES, layout.VALUES]
    rows = {}
    for key in wanted:
        if key not in arrays:
            raise _missing(path, key)
        rows[key] = _checked(path, key, arrays[key], shapes[key])
    counts = {key: len(value) for key, value in rows.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{path}: arrays differ in their number of rows: {counts}")
    _check_policy(path, rows[layout.POLICY])
    return rows


def count_rows(path: str | Path, pos_len: int) -> int:
    """The number of rows of a file, from its arrays' headers alone: quick enough to try every file before a run.

    Raises DataError where the file is damaged, a key is missing, or a shape does not fit.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            shapes = {name.removesuffix(".npy"): _header_shape(archive, name) for name in archive.namelist() if name.endswith(".npy")}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:
        raise DataError(f"{path}: cannot be read as an npz file ({error}): it is damaged or not an npz; replace it") from None
    expected = layout.row_shapes(pos_len)
    planes_key = layout.PACKED if layout.PACKED in shapes else layout.PLANES
    for key in (planes_key, layout.GLOBALS, layout.POLICY, layout.TARGETS, layout.SCORES, layout.VALUES):
        if key not in shapes:
            raise _missing(path, key)
        if len(shapes[key]) != len(expected[key]) + 1:
            raise _misshapen(path, key, shapes[key], expected[key])
        if any(have < want if key in (layout.POLICY, layout.TARGETS) else have != want for have, want in zip(shapes[key][1:], expected[key])):
            raise _misshapen(path, key, shapes[key], expected[key])
    return shapes[layout.TARGETS][0]


def _header_shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(file)[0]


def _missing(path: Path, key: str) -> DataError:
    either = f" (nor {layout.PACKED})" if key == layout.PLANES else ""
    return DataError(f"{path}: key {key}{either} is missing: write the file again or take it out of the folder")


def _misshapen(path: Path, key: str, shape: tuple[int, ...], row_shape: tuple[int, ...]) -> DataError:
    expected = ", ".join(map(str, ("N", *row_shape)))
    return DataError(f"{path}: key {key} has shape {shape}, expected ({expected}): is --pos-len right?")


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            keys = set(layout.row_shapes(2)) | {"pos_len"}
            return {key: file[key] for key in file.files if key in keys}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:  # a damaged file raises whatever its bytes happen to mean; object arrays are never unpickled
        raise DataError(f"{path}: cannot be read as an npz file ({error}): it is damaged or not an npz; replace it") from None


def _checked(path: Path, key: str, array: np.ndarray, row_shape: tuple[int, ...]) -> np.ndarray:
    """`array` without the policy rows that are not used; its shape and values checked."""
    if key == layout.POLICY and array.ndim == 3:
        array = array[:, : layout.NUM_POLICY_TARGETS]
    if key == layout.TARGETS and array.ndim == 2 and array.shape[1] > row_shape[0]:
        row_shape = array.shape[1:]  # upstream writes more columns than are read
    if array.shape[1:] != row_shape or array.ndim != len(row_shape) + 1:
        raise _misshapen(path, key, array.shape, row_shape)
    if key == layout.PACKED and array.dtype != np.uint8:
        raise DataError(f"{path}: key {key} has dtype {array.dtype}, expected uint8")
    if array.dtype.kind not in "biuf":  # bool, signed, unsigned, float
        raise DataError(f"{path}: key {key} has dtype {array.dtype}, expected numbers")
    if np.issubdtype(array.dtype, np.floating):
        bad = np.flatnonzero(~np.isfinite(array).all(axis=tuple(range(1, array.ndim))))
        if bad.size:
            raise DataError(f"{path}: key {key} row {bad[0]} is not finite ({bad.size} such rows): remove them")
    return array


def _check_policy(path: Path, policy: np.ndarray):
    """Refuse a row whose visit counts sum to nothing: dividing by the sum makes it NaN and ruins the whole step."""
    total = policy.sum(axis=-1, dtype=np.float64)
    bad = np.argwhere((total <= 0) | (policy.min(axis=-1) < 0))
    if len(bad):
        row, which = bad[0]
        raise DataError(
            f"{path}: key {layout.POLICY} row {row} policy {which} is all zero or negative ({len(bad)} such rows): remove them"
        )
