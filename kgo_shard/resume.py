"""What a run remembers besides its state, and whether a run with other options or other data may go on from it."""

import functools
import importlib.metadata
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .batches import Place, name_in, rows_read
from .config import Config
from .mesh import make_mesh
from .store import CheckpointError

FORMAT = 1
# Options that change neither what is computed nor in which order: how long, how often, where, on how many devices.
HARMLESS = frozenset(
    "traindir datadir print_every steps_per_jit save_every_samples val_every_samples max_val_batches allow_nonfull_mask no_resume"
    " no_final_save log_step_time component_profile component_profile_repeats component_profile_grad donate_train_buffers"
    " xla_peak_tflops data_parallel data_parallel_devices check_replicas checkpoint_format keep resume_order allow_changes on_nonfinite".split()
)


@dataclass
class Memory:
    """The host's part of a run: with the TrainState it is all that the next step depends on."""

    place: Place
    window: dict[str, Any]  # the log window, see train.Window
    marks: dict[str, dict[str, int]]  # when the next save, validation and check are due, see train.Marks
    warned: bool  # of small boards


def to_json(step: int, samples: int, memory: Memory, config: Config, data: dict[str, str], folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's run.json; `data` are the `contents` of the training files in `folder` when the run began."""
    return {
        "format": FORMAT,
        "step": step,
        "samples": samples,
        "devices": make_mesh(config).size,
        "options": {f.name: getattr(config, f.name) for f in fields(config)},
        "versions": versions(),
        "place": memory.place.to_json(folder),
        "window": memory.window,
        "marks": memory.marks,
        "warned": memory.warned,
        "data": data,
    }


@functools.cache
def versions() -> dict[str, str]:
    """Looked up once, not at every save."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "numpy")}


def from_json(path: Path, run: dict[str, Any], config: Config, files: Sequence[Path], folder: Path) -> Memory:
    """The memory of a checkpoint at `path`. CheckpointError where options or data have changed in a way that matters."""
    if run.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {run.get('format')}, but this version reads {FORMAT}: use the version that wrote it")
    if missing := sorted({"samples", "devices", "options", "place", "window", "marks", "warned", "data"} - run.keys()):
        raise CheckpointError(f"{path}: run.json has no {', '.join(missing)}: it is not of this trainer")
    check_options(path, run["options"], config)
    place = run["place"]
    if place["order"] and config.resume_order == "exact":
        check_data(path, run["data"], place["order"][place["file"] :], files, folder)
        rows = [rows_read(options) for options in (Config(**known(run["options"])), config)]
        if rows[0] != rows[1]:
            raise CheckpointError(
                f"{path}: it stands in an epoch that is read in batches of {rows[0]} rows, this run reads {rows[1]}: "
                "begin an epoch with --resume-order legacy"
            )
    return Memory(Place.from_json(run["place"], folder), run["window"], run["marks"], run["warned"])


def known(saved: dict[str, Any]) -> dict[str, Any]:
    """The saved options that this version has; how many devices there were does not matter where they are not asked for."""
    names = {f.name for f in fields(Config)} - {"data_parallel", "data_parallel_devices", "allow_changes"}
    return {name: value for name, value in saved.items() if name in names}


def check_options(path: Path, saved: dict[str, Any], config: Config):
    """CheckpointError naming every option whose change would change the run, with both values."""
    allowed = HARMLESS | set(config.allowed_changes)
    if config.lr_schedule == "constant":
        allowed |= {"max_training_samples"}
    changed = [
        f"{f.name} was {saved[f.name]!r} and is {getattr(config, f.name)!r}"
        for f in fields(config)
        if f.name in saved and f.name not in allowed and saved[f.name] != getattr(config, f.name)
    ]
    if changed:
        names = ",".join(text.partition(" ")[0] for text in changed)
        raise CheckpointError(
            f"{path}: options have changed: {'; '.join(changed)}. Give the old values, or --allow-changes {names}, or another --traindir"
        )


def check_data(path: Path, saved: dict[str, str], order: Sequence[str], files: Sequence[Path], folder: Path):
    """CheckpointError where a file of the epoch that is to be finished is gone or has other content. New files wait for the next epoch."""
    present = named(files, folder)
    for name in order:
        if name not in present:
            raise CheckpointError(f"{path}: {folder / name} is gone in the middle of its epoch: bring it back, or begin an epoch with --resume-order legacy")
        if content_of(present[name]) != saved[name]:
            raise CheckpointError(
                f"{path}: {folder / name} has other content than when the run was saved, in the middle of its epoch: bring the old "
                "file back, or begin an epoch with --resume-order legacy"
            )


def named(files: Sequence[Path], folder: Path) -> dict[str, Path]:
    return {name_in(folder, path): path for path in files}


def contents(files: Sequence[Path], folder: Path) -> dict[str, str]:
    return {name: content_of(path) for name, path in named(files, folder).items()}


def content_of(path: Path) -> str:
    """A checksum of what an npz file holds, quick to have: its directory has the CRC-32 of every array."""
    with zipfile.ZipFile(path) as archive:
        entries = sorted((entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist())
    return f"{zlib.crc32(repr(entries).encode()):08x}-{sum(size for _, size, _ in entries)}"
