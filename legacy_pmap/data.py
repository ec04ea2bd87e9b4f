"""Self-play rows: files -> validated arrays -> the ordered stream of float32 batches (spec, section 1).

The stream is part of the contract: the same files, configuration and seed give the same batches, array for array.
"""

import contextlib
import json
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np

NUM_PLANES = 22
NUM_GLOBALS = 19
NUM_HISTORY = 5
MIN_TARGET_COLUMNS = 41  # the last column that the objective or the history flags name is 40
STOP_HISTORY_FROM = 0.98

# symmetry_type -> the symmetries one draw chooses from
ALLOWED_SYMMETRIES = {"xyt": tuple(range(8)), "x": (0, 5), "xy": (0, 2, 5, 7), "x+y": (0, 2), "t": (0, 4)}


class DataError(ValueError):
    """Bad training data; the message names file, key and, where there is one, row."""


# ---------------------------------------------------------------------------------------------------------------- files


def list_files(folder):
    """`*.npz` directly in the folder, or those of `index.json`, or every `**/*.npz`; sorted strings.

    Raises DataError for a missing folder, an unreadable index, or no file at all.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it must hold .npz files or an index.json")
    files = sorted(str(path) for path in folder.glob("*.npz"))
    if not files and (folder / "index.json").is_file():
        files = _indexed_files(folder, folder / "index.json")
    if not files:
        files = sorted(str(path) for path in folder.glob("**/*.npz"))
    if not files:
        raise DataError(f"{folder}: holds no .npz file, directly, by index.json, or in a subfolder")
    return files


def _indexed_files(folder, index):
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["files"]
        assert isinstance(entries, list)
    except (ValueError, KeyError, TypeError, AssertionError, OSError):
        raise DataError(f'{index}: not a JSON object of the form {{"files": [...]}}') from None
    files = []
    for entry in entries:
        if isinstance(entry, dict):
            entry = next((entry[key] for key in ("name", "path", "file", "filename") if key in entry), None)
        if not isinstance(entry, str):
            continue  # names no file; like a name whose file does not exist
        path = folder / entry  # an absolute entry replaces the folder
        if path.suffix == ".npz" and path.is_file():
            files.append(str(path))
    return sorted(files)


_TARGETS = ("globalInputNC", "policyTargetsNCMove", "globalTargetsNC", "scoreDistrN", "valueTargetsNCHW")
_WANTED = ("binaryInputNCHWPacked", "binaryInputNCHW", *_TARGETS)


@contextlib.contextmanager
def _opened(path):
    """The npz archive; everything that NumPy raises for a bad file becomes a DataError."""
    try:
        # Opened here and not by np.load, which leaves a file that it refuses open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            yield archive
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (AttributeError, TypeError):  # a bare .npy gives an array, which is no context manager
        raise DataError(f"{path}: a single array, not an npz file with named arrays") from None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable npz file, truncated or with pickled objects ({reason}); write it again") from None


def _header(archive, key):
    """(shape, dtype) of one member, without reading its rows."""
    with archive.zip.open(key + ".npy") as member:
        version = np.lib.format.read_magic(member)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is not None:
            shape, _, dtype = read(member)
            return shape, dtype
    return archive[key].shape, archive[key].dtype


def check_rows(path, config):
    """Checks one file's headers against the configuration and returns its number of rows; reads no rows.

    Raises DataError naming file and key for a truncated file, a missing key, a wrong dtype, or a shape that does not fit pos_len.
    """
    size, area = config.pos_len, config.board_area
    with _opened(path) as archive:
        headers = {key: _header(archive, key) for key in _WANTED if key in archive.files}
        stated = archive["pos_len"] if "pos_len" in archive.files else None
    packed = "binaryInputNCHWPacked" in headers
    planes = "binaryInputNCHWPacked" if packed else "binaryInputNCHW"
    if planes not in headers:
        raise DataError(f"{path}: keys binaryInputNCHWPacked and binaryInputNCHW are both missing; is this a KataGo training file?")
    for key in (planes, *_TARGETS):
        if key not in headers:
            raise DataError(f"{path}: key {key} is missing; is this a KataGo training file?")
        dtype = headers[key][1]
        if dtype.kind not in "biuf" or (packed and key == planes and dtype != np.uint8):
            raise DataError(f"{path}: key {key} has dtype {dtype}, not {'uint8' if packed and key == planes else 'numbers'}")
    if stated is not None and (stated.size != 1 or stated.reshape(()).item() != size):
        raise DataError(f"{path}: key pos_len is {stated.tolist()}, but option pos_len={size}")
    rows = (headers[planes][0] or (0,))[0]
    expected = {
        planes: (rows, NUM_PLANES, -(-area // 8)) if packed else (rows, NUM_PLANES, size, size),
        "globalInputNC": (rows, NUM_GLOBALS),
        "policyTargetsNCMove": (rows, 2, area + 1),
        "globalTargetsNC": (rows, MIN_TARGET_COLUMNS),
        "scoreDistrN": (rows, config.score_buckets),
        "valueTargetsNCHW": (rows, 5, size, size),
    }
    longer = ("policyTargetsNCMove", "globalTargetsNC")  # whose axis 1 may be longer than stated
    for key, shape in expected.items():
        found = headers[key][0]
        fits = len(found) == len(shape) and all(
            f >= s if i == 1 and key in longer else f == s for i, (f, s) in enumerate(zip(found, shape)))
        if not fits:
            wanted = ", ".join(f"{s} or more" if i == 1 and key in longer else str(s) for i, s in enumerate(shape))
            raise DataError(f"{path}: key {key} has shape {found}, but pos_len={size} with {rows} rows needs ({wanted}); "
                            "check option pos_len")
    return rows


def load_rows(path, config):
    """One file's arrays as stored, all checked (see check_rows for the errors).

    Returns: dict with binaryInputNCHWPacked (N,22,ceil(A/8)) uint8 or binaryInputNCHW (N,22,P,P), and the other five keys; the
    policy targets cut to their first two rows.
    """
    check_rows(path, config)
    with _opened(path) as archive:
        planes = next(key for key in _WANTED if key in archive.files)  # the packed ones, where a file has both
        arrays = {key: archive[key] for key in (planes, *_TARGETS)}
    arrays["policyTargetsNCMove"] = arrays["policyTargetsNCMove"][:, :2]
    return arrays


# -------------------------------------------------------------------------------------------------------------- batches


def read_batches(files, config, seed):
    """Yields batches of config.batch_size rows: contiguous float32 arrays under the six keys of the spec's section 1.

    Arguments: files, in the order to read them; config (batch_size, pos_len, symmetry_type, enable_history_matrices); seed of
    the stream's own generator.
    Returns: iterator of dicts with binaryInputNCHW (B,22,P,P), globalInputNC (B,19), policyTargetsNCMove (B,2,A+1),
    globalTargetsNC (B,>=41), scoreDistrN (B,S), valueTargetsNCHW (B,5,P,P).
    Raises: DataError (while iterating) for a bad file, or when no file holds enough rows for one batch (spec, 7.6).
    """
    files = [os.fspath(path) for path in files]
    every_image = config.symmetry_type == "all"
    rows = config.batch_size // 8 if every_image else config.batch_size
    rand = np.random.default_rng(seed)
    found = 0
    for path in files:
        stored = load_rows(path, config)
        for start in range(0, stored["globalInputNC"].shape[0] // rows * rows, rows):
            batch = _float_rows(stored, slice(start, start + rows), config.pos_len)
            if config.enable_history_matrices:
                batch = _drop_history(batch, rand)
            if every_image:
                images = [_apply_symmetry(batch, symmetry, config.pos_len) for symmetry in range(8)]
                batch = {key: np.concatenate([image[key] for image in images]) for key in batch}
            elif config.symmetry_type != "none":
                allowed = ALLOWED_SYMMETRIES[config.symmetry_type]
                batch = _apply_symmetry(batch, allowed[rand.integers(0, len(allowed))], config.pos_len)
            found += 1
            yield {key: np.ascontiguousarray(array, np.float32) for key, array in batch.items()}
    if not found:
        where = os.path.dirname(files[0]) if files else "(no files)"
        raise DataError(f"{where}: none of {len(files)} files holds the {rows} rows one batch needs; "
                        "lower option batch_size or join the files")


def _float_rows(stored, rows, size):
    batch = {key: stored[key][rows].astype(np.float32) for key in _TARGETS}
    if "binaryInputNCHWPacked" in stored:
        bits = np.unpackbits(stored["binaryInputNCHWPacked"][rows], axis=-1, count=size * size, bitorder="big")
        planes = bits.reshape(bits.shape[0], NUM_PLANES, size, size)
    else:
        planes = stored["binaryInputNCHW"][rows]
    return {"binaryInputNCHW": planes.astype(np.float32), **batch}


def _history_matrices():
    """M_base (22,22) and M_0..M_4 (5,22,22): what dropping a past move does to the planes that depend on it."""
    base = np.diag(np.ones(NUM_PLANES, np.float32))
    for plane in (9, 10, 11, 12, 13, 15, 16):
        base[plane, plane] = 0.0
    base[14, 15] = base[14, 16] = 1.0
    steps = np.zeros((NUM_HISTORY, NUM_PLANES, NUM_PLANES), np.float32)
    for i in range(NUM_HISTORY):
        steps[i, 9 + i, 9 + i] = 1.0
    steps[0, 14, 15] = steps[0, 14, 16] = -1.0
    steps[0, 15, 15] = steps[0, 15, 16] = 1.0
    steps[1, 15, 16] = -1.0
    steps[1, 16, 16] = 1.0
    return base, steps


_HISTORY_BASE, _HISTORY_STEPS = _history_matrices()


def _drop_history(batch, rand):
    """Each row keeps its last moves up to a random stop; draws rows x 5 numbers."""
    planes = batch["binaryInputNCHW"]
    stop = rand.random((planes.shape[0], NUM_HISTORY)) >= STOP_HISTORY_FROM
    include = (np.cumsum(stop, axis=1, dtype=np.float32) <= 0.1).astype(np.float32)
    matrix = _HISTORY_BASE + np.einsum("bi,ikl->bkl", include, _HISTORY_STEPS)
    flat = planes.reshape(planes.shape[0], NUM_PLANES, -1)
    moved = np.matmul(matrix.transpose(0, 2, 1), flat).reshape(planes.shape)
    keep = np.ones((planes.shape[0], NUM_GLOBALS), np.float32)
    keep[:, :NUM_HISTORY] = include
    return {**batch, "binaryInputNCHW": moved, "globalInputNC": batch["globalInputNC"] * keep}


def symmetric(boards, symmetry):
    """The numbered symmetry (0..7) of the last two axes (H, W)."""
    if symmetry in (1, 3, 4, 6):
        boards = np.swapaxes(boards, -1, -2)
    if symmetry in (1, 2, 6, 7):
        boards = np.flip(boards, -2)
    if symmetry in (2, 3, 5, 6):
        boards = np.flip(boards, -1)
    return boards


def _apply_symmetry(batch, symmetry, size):
    policy = batch["policyTargetsNCMove"]
    board = symmetric(policy[:, :, :-1].reshape(policy.shape[0], 2, size, size), symmetry)
    moved = np.concatenate([board.reshape(policy.shape[0], 2, -1), policy[:, :, -1:]], axis=2)
    return {**batch, "binaryInputNCHW": symmetric(batch["binaryInputNCHW"], symmetry), "policyTargetsNCMove": moved,
            "valueTargetsNCHW": symmetric(batch["valueTargetsNCHW"], symmetry)}
