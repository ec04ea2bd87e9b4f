"""Files + seed -> batches in the original's order.

The stream yields rows as they are stored (bits packed, small integers) with the random draws beside them; the device
finishes them inside the step (augment.py). `read_batches` is the original's form of the same stream.
"""

import copy
import itertools
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from . import augment, layout
from .config import SYMMETRIES, Config
from .npz import DataError, count_rows, load_rows

HISTORY_STOP = 0.98  # a draw at or above it ends the history at that move
VALIDATION_SEED = 999983


def warn(message: str):
    print("warning: " + " ".join(message.split()), file=sys.stderr)


class BadFiles:
    """Files that cannot be trained on: the first one ends the run, or with --skip-bad-files each is told of once and left out whole."""

    def __init__(self, skip: bool, tell: Callable[[str], None] = warn):
        self.skip, self.tell = skip, tell
        self.reasons: dict[Path, DataError] = {}
        self.former: set[Path] = set()  # that the run met before it was started again

    def meet(self, path: Path, error: DataError):
        """Raises `error` unless bad files are skipped."""
        if path not in self.reasons:
            self.reasons[path] = error
            if self.skip:
                self.tell(f"skipped: {error}")
        if not self.skip:
            raise error

    @property
    def paths(self) -> list[Path]:
        """All that the run has met, also before it was started again."""
        return sorted(self.former | self.reasons.keys(), key=str)

    def line(self) -> str | None:
        """What to say at the end; None where there was none."""
        names = " ".join(", ".join(map(str, self.paths)).split())
        return f"skipped as bad: {len(self.paths)} ({names})" if names else None


def find_files(folder: str | Path) -> list[Path]:
    """The npz files of a data folder: `*.npz`, else the names in `index.json`, else `**/*.npz`; sorted as text.

    As text, because the order of paths is another one where folders are nested: a-b/x.npz comes before a/x.npz.
    Names in `index.json` of files that are not there are left out, as the original does. Raises DataError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    files = sorted(folder.glob("*.npz"), key=str)
    if not files and (folder / "index.json").is_file():
        files = sorted((path for path in _index_paths(folder) if path.suffix == ".npz" and os.path.isfile(path)), key=str)
    return files or sorted(folder.glob("**/*.npz"), key=str)


def _index_paths(folder: Path) -> Iterator[Path]:
    index = folder / "index.json"
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["files"]
        if not isinstance(entries, list):
            raise TypeError("files is not a list")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f'{index}: expected {{"files": [...]}} ({type(error).__name__}: {error}): write it again or remove it') from None
    for entry in entries:
        if isinstance(entry, dict):
            entry = next((entry[key] for key in ("name", "path", "file", "filename") if key in entry), None)
        if not isinstance(entry, str):
            continue
        path = folder / entry  # an absolute entry replaces the folder, as in the original
        if not os.path.isabs(entry) and not os.path.abspath(path).startswith(os.path.abspath(folder) + os.sep):
            raise DataError(f"{index}: entry {entry!r} leads out of the folder: give its absolute path, if it is meant, or take it out")
        yield path


def epoch_files(files: Sequence[Path], seed: int) -> list[Path]:
    """The files of one epoch in training order; `seed` is the run's seed plus the step at which the epoch starts."""
    files = sorted(files, key=str)
    np.random.default_rng(seed).shuffle(files)
    return files


@dataclass
class Place:
    """Where a run stands in an epoch: what its next batch is and what it draws. A run that is saved carries it."""

    order: list[Path] = field(default_factory=list)  # the epoch's files; none: the next epoch has not begun
    seed: int = 0  # of the epoch: the run's plus the step at which the epoch began
    file: int = 0  # index in `order`
    batch: int = 0  # batches of that file that are done
    rand: np.random.Generator | None = None  # history and symmetry draws, after those of the batches that are done
    # File and first row of the batch that was handed out last, and of those of the last chunk: not saved.
    last: tuple[Path, int] | None = None
    taken: list[tuple[Path, int]] = field(default_factory=list)

    def copy(self) -> "Place":
        """This place, whatever is read on from here."""
        return replace(self, rand=copy.deepcopy(self.rand))

    def begin(self, files: Sequence[Path], seed: int):
        """An epoch over all files, from its first batch."""
        self.order, self.seed, self.file, self.batch, self.rand = epoch_files(files, seed), seed, 0, 0, np.random.default_rng(seed)

    def to_json(self, folder: Path) -> dict[str, Any]:
        """Plain values; the files as seen from their `folder`, which may be another one when the run goes on."""
        state = None if self.rand is None else self.rand.bit_generator.state
        return {"order": [name_in(folder, path) for path in self.order], "seed": self.seed, "file": self.file, "batch": self.batch, "rand": state}

    @classmethod
    def from_json(cls, saved: dict[str, Any], folder: Path) -> "Place":
        """Raises KeyError, TypeError or ValueError where it was not made by `to_json`."""
        rand = None
        if saved["rand"] is not None:
            rand = np.random.default_rng()
            rand.bit_generator.state = saved["rand"]
        order, seed, file, batch = ([folder / name for name in saved["order"]], *(operator.index(saved[name]) for name in ("seed", "file", "batch")))
        if min(seed, file, batch) < 0 or file > len(order) or (order and rand is None):
            raise ValueError(f"file {file}, batch {batch} is no place among {len(order)} files")
        return cls(order, seed, file, batch, rand)


def name_in(folder: Path, path: Path) -> str:
    """What a file is called wherever its folder lies; a file elsewhere (`index.json` may name one) is called by its whole path."""
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path.absolute())


def read_ahead(files: Sequence[str | Path], config: Config) -> Iterator[tuple[str | Path, dict[str, np.ndarray] | DataError]]:
    """Each file with its rows, or with what is wrong with it; while one is trained on, a thread reads the next."""

    def load(path):
        try:
            return load_rows(path, config.pos_len, config.allow_nonfull_mask)
        except DataError as error:
            return error

    thread = ThreadPoolExecutor(1)
    try:
        coming = None
        for path, following in itertools.zip_longest(files, files[1:]):
            rows = coming.result() if coming else load(path)
            coming = thread.submit(load, following) if following else None
            yield path, rows
    finally:
        thread.shutdown(wait=False)  # who stops early does not wait for a file that nobody wants


def read_packed_batches(
    files: Sequence[str | Path], config: Config, seed: int, place: Place | None = None, bad: BadFiles | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of B consecutive rows of each file, in the order given; a file's remainder is dropped.

    Each batch is a dict of the six arrays in their stored dtypes (see `npz.load_rows`) and, where enabled,
    `historyInclude` (B, 5) float32 and `symmetry` (B,) int32. Starts at `place` where one is given, and moves it on before each
    batch is handed out. Every row of a file is checked before its first batch. Raises DataError where no file holds B rows, and at a
    file that is `bad` unless those are skipped.
    """
    place = Place(rand=np.random.default_rng(seed)) if place is None else place
    bad = BadFiles(config.skip_bad_files) if bad is None else bad
    images = SYMMETRIES[config.symmetry_type]
    num_read = rows_read(config)
    largest, resumed = (0, None), (place.file, place.batch) != (0, 0)
    for path, rows in read_ahead(files[place.file :], config):
        if isinstance(rows, DataError):
            bad.meet(path, rows)
            place.file, place.batch = place.file + 1, 0
            continue
        num_rows = len(rows[layout.TARGETS])
        largest = max(largest, (num_rows, path), key=lambda entry: entry[0])
        while (start := place.batch * num_read) + num_read <= num_rows:
            batch = {key: value[start : start + num_read] for key, value in rows.items()}
            if config.enable_history_matrices:
                batch[layout.HISTORY] = draw_history(place.rand, num_read)
            if config.symmetry_type == "all":
                batch = {key: np.concatenate([value] * 8) for key, value in batch.items()}
                batch[layout.SYMMETRY] = np.repeat(np.arange(8, dtype=np.int32), num_read)
            elif images:
                image = images[place.rand.integers(0, len(images))]
                batch[layout.SYMMETRY] = np.full(num_read, image, np.int32)
            place.batch, place.last = place.batch + 1, (path, start)
            yield batch
        place.file, place.batch = place.file + 1, 0
    if not resumed:  # the rest of an epoch may well hold no batch
        refuse_small_files(num_read, *largest, skipped=len(bad.reasons))


def rows_read(config: Config) -> int:
    """Rows of the files that make one batch."""
    return config.batch_size // 8 if config.symmetry_type == "all" else config.batch_size


def refuse_small_files(num_read: int, num_rows: int, path: Path | None, skipped: int):
    """DataError where the largest file, `path` with `num_rows` rows, holds no batch: an epoch would have no step."""
    if path is None:
        remedy = "every file was skipped as bad: mend one" if skipped else "there is none: give some"
        raise DataError(f"no file holds the {num_read} rows of a batch; {remedy}, or give another --datadir")
    if num_rows < num_read:
        raise DataError(
            f"no file holds the {num_read} rows of a batch (largest: {path} with {num_rows} rows): "
            "use a smaller --batch-size or larger files"
        )


def check_files(folder: Path, config: Config, num_read: int, bad: BadFiles | None = None) -> list[Path]:
    """The folder's files, every one readable (or skipped as `bad`) and one large enough, by their headers: before a run writes anything."""
    bad = BadFiles(config.skip_bad_files) if bad is None else bad
    found = find_files(folder)
    if not found:
        raise DataError(f"{folder}: holds no npz files (*.npz, index.json or deeper folders): put some there, or give another --datadir")
    counts = {}
    for path in found:
        try:
            counts[path] = count_rows(path, config.pos_len)
        except DataError as error:
            bad.meet(path, error)
    largest = max(counts, key=counts.get, default=None)
    if largest is None:
        raise DataError(f"{folder}: every file was skipped as bad: mend one, or give another --datadir")
    refuse_small_files(num_read, counts[largest], largest, skipped=len(found) - len(counts))
    if small := [path for path, rows in counts.items() if rows < num_read]:
        warn(f"{len(small)} of {len(found)} files hold fewer rows than the {num_read} of a batch and are never read: {small[0]} holds {counts[small[0]]}")
    return list(counts)


def draw_history(rand: np.random.Generator, num_rows: int) -> np.ndarray:
    """(num_rows, 5) float32: 1 for each of the last five moves that the row keeps."""
    stop = rand.random((num_rows, layout.NUM_HISTORY)) >= HISTORY_STOP
    return (np.cumsum(stop, axis=1, dtype=np.float32) <= 0.1).astype(np.float32)


def read_batches(files: Sequence[str | Path], config: Config, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """The same stream as the original hands it to the device: six float32 host arrays, unpacked and augmented."""
    expand = jax.jit(augment.expand, static_argnames="pos_len")
    for batch in read_packed_batches(files, config, seed):
        yield {key: np.array(value) for key, value in expand(batch, pos_len=config.pos_len).items()}


def read_validation(files: Sequence[Path], config: Config, total_samples: int, bad: BadFiles | None = None) -> Iterator[dict[str, np.ndarray]]:
    """The batches of one validation after `total_samples` training rows: no symmetry, history as in training."""
    unrotated = config.replace(symmetry_type="none")
    batches = read_packed_batches(files, unrotated, config.seed + total_samples + VALIDATION_SEED, bad=bad)
    return itertools.islice(batches, config.max_val_batches or None)
