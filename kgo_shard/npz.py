"""One npz file -> validated host arrays, or an error that names the file, the key and the row."""

import contextlib
import copy
import math
import os
import stat
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from . import layout


class DataError(ValueError):
    """Data that cannot be trained on; the message names file, key and row, and what to do."""


class Header(NamedTuple):
    """What an array's own header says of it, and where its numbers begin in its entry of the zip file."""

    shape: tuple[int, ...]
    columns_first: bool
    dtype: np.dtype
    start: int


def load_rows(path: str | Path, pos_len: int, allow_nonfull_mask: bool = False) -> dict[str, np.ndarray]:
    """Read one file of self-play rows.

    Returns the six arrays that training reads, in their stored dtypes, rows first: the planes packed
    (`binaryInputNCHWPacked`) or not (`binaryInputNCHW`), whichever the file has, and only the two policy rows in use. Boards smaller
    than pos_len are refused unless `allow_nonfull_mask`. Raises DataError; nothing in the file is ever unpickled.
    """
    path = Path(path)
    with _opened(path) as archive:
        headers = _checked_headers(path, archive, pos_len)
        entries = {key: _read_entry(path, archive, key) for key in headers}
    with ThreadPoolExecutor(len(headers)) as threads:  # they inflate side by side
        arrays = threads.map(lambda key: _make_array(path, key, headers[key], *entries.pop(key)), headers)
        rows = dict(zip(headers, arrays, strict=True))
    rows[layout.POLICY] = rows[layout.POLICY][:, : layout.NUM_POLICY_TARGETS]
    for key, array in rows.items():
        _check_finite(path, key, array)
    _check_counts(path, rows[layout.POLICY], rows[layout.SCORES])
    _check_weights(path, rows[layout.TARGETS])
    if not allow_nonfull_mask:
        _check_boards(path, rows, pos_len)
    return rows


def count_rows(path: str | Path, pos_len: int) -> int:
    """The number of rows of a file, from its arrays' headers alone: quick enough to try every file before a run.

    Raises DataError where the file is damaged, a key is missing, or a shape or dtype does not fit.
    """
    path = Path(path)
    with _opened(path) as archive:
        return _checked_headers(path, archive, pos_len)[layout.TARGETS].shape[0]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise DataError(f"{path}: is not a regular file: take it out of the folder")
        archive = zipfile.ZipFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file: bring it back, or take its name out of the folder") from None
    except PermissionError:
        raise DataError(f"{path}: may not be read (permission denied): allow it, or take the file out of the folder") from None
    except DataError:
        raise
    except Exception as error:  # a damaged file raises whatever its bytes happen to mean
        raise _damaged(path, error) from None
    with archive:
        yield archive


def _damaged(path: Path, error: Exception, key: str | None = None) -> DataError:
    where = f"key {key} cannot be read" if key else "cannot be read as an npz file"
    return DataError(f"{path}: {where} ({error or type(error).__name__}): it is damaged or not an npz; replace it or take it out of the folder")


def _checked_headers(path: Path, archive: zipfile.ZipFile, pos_len: int) -> dict[str, Header]:
    """The headers of the six arrays that are read."""
    expected = layout.row_shapes(pos_len)
    stored = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
    if "pos_len" in stored:
        header = _read_header(path, archive, "pos_len")
        if math.prod(header.shape) != 1:
            raise DataError(f"{path}: key pos_len has shape {header.shape}, expected one number, {pos_len}: write the file again or take it out of the folder")
        saved = _read_array(path, archive, "pos_len", header).item()
        if saved != pos_len:
            raise DataError(f"{path}: key pos_len says {saved} but the run says {pos_len}: change --pos-len")
    planes_key = layout.PACKED if layout.PACKED in stored else layout.PLANES
    headers = {}
    for key in (planes_key, layout.GLOBALS, layout.POLICY, layout.TARGETS, layout.SCORES, layout.VALUES):
        if key not in stored:
            either = f" (nor {layout.PACKED})" if key == layout.PLANES else ""
            raise DataError(f"{path}: key {key}{either} is missing: write the file again or take it out of the folder")
        headers[key] = _read_header(path, archive, key)
        _check_shape(path, key, headers[key].shape, expected[key])
        if key == layout.PACKED and headers[key].dtype != np.uint8:
            raise DataError(f"{path}: key {key} has dtype {headers[key].dtype}, expected uint8: write the file again or take it out of the folder")
    counts = {key: header.shape[0] for key, header in headers.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{path}: arrays differ in their number of rows: {counts}: write the file again or take it out of the folder")
    size = sum(math.prod(header.shape) * header.dtype.itemsize for header in headers.values())
    if size > (memory := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        raise DataError(f"{path}: its rows take {size / 2**30:.0f} GiB, this machine has {memory / 2**30:.0f}: split the file or take it out of the folder")
    return headers


def _read_header(path: Path, archive: zipfile.ZipFile, key: str) -> Header:
    """The header of one array. DataError where it promises other bytes than the file has: nothing is allocated for a promise."""
    name = key + ".npy"
    try:
        with archive.open(name) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            header = Header(*read(file), file.tell())
            shape, _, dtype, _ = header
    except Exception as error:
        raise _damaged(path, error, key) from None
    if dtype.kind not in "biuf":  # bool, signed, unsigned, float
        raise DataError(f"{path}: key {key} has dtype {dtype}, expected numbers: write the file again or take it out of the folder")
    promised, held = math.prod(shape) * dtype.itemsize, archive.getinfo(name).file_size - header.start
    if promised != held or min(shape, default=0) < 0:
        raise _damaged(path, ValueError(f"its header says shape {shape} of {dtype}, {promised} bytes, but there are {held}"), key)
    return header


def _read_array(path: Path, archive: zipfile.ZipFile, key: str, header: Header) -> np.ndarray:
    """One array whose header was checked; read-only."""
    return _make_array(path, key, header, *_read_entry(path, archive, key))


def _read_entry(path: Path, archive: zipfile.ZipFile, key: str) -> tuple[zipfile.ZipInfo, bytes]:
    """An array's entry as it lies in the file: still deflated, if it is. Of one thread alone: since Python 3.12 zipfile loses its place
    where two open entries."""
    try:
        info = archive.getinfo(key + ".npy")
        as_it_lies = copy.copy(info)
        if info.compress_type == zipfile.ZIP_DEFLATED:
            as_it_lies.compress_type, as_it_lies.file_size, as_it_lies.CRC = zipfile.ZIP_STORED, info.compress_size, None
        with archive.open(as_it_lies) as file:
            entry = file.read(as_it_lies.file_size)
            file.read(1)  # the end of the entry: its checksum is looked at only there
        return info, entry
    except Exception as error:
        raise _damaged(path, error, key) from None


def _make_array(path: Path, key: str, header: Header, info: zipfile.ZipInfo, entry: bytes) -> np.ndarray:
    """The array of an entry. Inflated by ISA-L, in a third of zlib's time, while other threads run; never to more than its header promised."""
    try:
        if info.compress_type == zipfile.ZIP_DEFLATED:
            entry = isal_zlib.decompressobj(wbits=-15).decompress(entry, info.file_size)
            if isal_zlib.crc32(entry) != info.CRC:
                raise zipfile.BadZipFile(f"bad checksum of {info.filename}")
        return np.ndarray(header.shape, header.dtype, entry, header.start, order="F" if header.columns_first else "C")
    except Exception as error:
        raise _damaged(path, error, key) from None


def _check_shape(path: Path, key: str, shape: tuple[int, ...], row_shape: tuple[int, ...]):
    """Upstream writes more policy rows and more target columns than are read; everything else has to fit."""
    may_be_longer = key in (layout.POLICY, layout.TARGETS)
    fits = len(shape) == len(row_shape) + 1 and shape[2:] == row_shape[1:]
    if not fits or (shape[1] < row_shape[0] if may_be_longer else shape[1] != row_shape[0]):
        expected = ", ".join(map(str, ("N", *row_shape)))
        raise DataError(f"{path}: key {key} has shape {shape}, expected ({expected}): is --pos-len right?")


def _check_finite(path: Path, key: str, array: np.ndarray):
    if array.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):  # training reads float32: a float64 may be too large for it
        finite = np.isfinite(array.astype(np.float32, copy=False)).all(axis=tuple(range(1, array.ndim)))
    if not finite.all():
        raise _bad_rows(path, key, ~finite, "is not finite")


def _check_counts(path: Path, policy: np.ndarray, scores: np.ndarray):
    """Refuse rows whose visit counts are all zero: dividing by their sum makes them NaN and ruins the whole step, at weight 0 too."""
    bad = (policy.min(axis=-1) < 0) | (policy.max(axis=-1) <= 0)
    if bad.any():
        which = np.argmax(bad.any(axis=0))
        raise _bad_rows(path, layout.POLICY, bad[:, which], f"policy {which} is all zero or negative")
    if (bad := scores.min(axis=-1) < 0).any():
        raise _bad_rows(path, layout.SCORES, bad, "is negative")


def _check_weights(path: Path, targets: np.ndarray):
    """A negative weight would train away from a target, and the log's means would not show it."""
    for name in ("row_weight", "policy_weight", "ownership_weight", "reply_weight", "lead_weight", "future_weight", "scoring_weight"):
        column = getattr(layout.Column, name)
        if (bad := targets[:, column] < 0).any():
            raise _bad_rows(path, layout.TARGETS, bad, f"column {column} ({name}) is negative")


def _check_boards(path: Path, rows: dict[str, np.ndarray], pos_len: int):
    small = ~on_board(rows, pos_len).all(axis=-1)
    if small.any():
        key = layout.PACKED if layout.PACKED in rows else layout.PLANES
        raise DataError(
            f"{path}: key {key} row {np.argmax(small)} has a board smaller than pos_len {pos_len}, which the model takes as if it "
            f"filled the frame ({small.sum()} such rows): give --allow-nonfull-mask, or remove them"
        )


def on_board(rows: dict[str, np.ndarray], pos_len: int) -> np.ndarray:
    """(N, A) bool: the points of each row's frame that are on its board."""
    points = layout.num_points(pos_len)
    if layout.PACKED in rows:
        return np.unpackbits(rows[layout.PACKED][:, 0], axis=-1, count=points).astype(bool)
    return rows[layout.PLANES][:, 0].reshape(-1, points) == 1


def _bad_rows(path: Path, key: str, bad: np.ndarray, what: str) -> DataError:
    return DataError(f"{path}: key {key} row {np.argmax(bad)} {what} ({bad.sum()} such rows): remove them, or take the file out of the folder")
