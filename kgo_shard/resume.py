"""What a run remembers besides its state, and whether a run with other options or other data may go on from it."""

import functools
import importlib.metadata
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .batches import Place, name_in, rows_read
from .config import Config, ConfigError
from .journal import Window
from .mesh import make_mesh
from .npz import DataError
from .state import TrainState
from .store import CheckpointError

FORMAT = 1
# Options that change neither what is computed nor in which order: how long, how often, where, on how many devices; and how a run began.
HARMLESS = frozenset(
    "init_std traindir datadir print_every steps_per_jit save_every_samples val_every_samples max_val_batches allow_nonfull_mask no_resume"
    " no_final_save log_step_time component_profile component_profile_repeats component_profile_grad donate_train_buffers"
    " xla_peak_tflops data_parallel data_parallel_devices check_replicas checkpoint_format keep resume_order allow_changes on_nonfinite"
    " skip_bad_files tensorboard shard_state".split()
)


class Marks:
    """When to save, validate or check: from `next` on whenever `every` more samples (or steps) are done (0: never), and at the end."""

    def __init__(self, every: int, next: int):
        self.every, self.next = every, next

    def to_json(self) -> dict[str, int]:
        return {"every": self.every, "next": self.next}

    @classmethod
    def from_json(cls, saved: dict[str, int], every: int, now: int) -> "Marks":
        """The saved ones; counted from `now` where they are to come more or less often than before."""
        return cls(every, count(saved["next"]) if saved["every"] == every else now + every)

    def reached(self, samples: int, at_end: bool) -> bool:
        passed = bool(self.every) and samples >= self.next
        if passed:  # one call of K steps may pass several marks
            self.next += self.every * ((samples - self.next) // self.every + 1)
        return passed or at_end


@dataclass
class Memory:
    """The host's part of a run: with the TrainState it is all that the next step depends on."""

    place: Place  # after the last call whose update is in the state
    window: Window
    save: Marks
    validate: Marks
    replicas: Marks  # the checks that all devices hold the same state
    warned: bool = False  # of small boards
    skipped: int = 0  # updates that were not finite and were dropped
    owed: bool = False  # a validation that a bad file interrupted
    bad_files: list[Path] = field(default_factory=list)  # that were skipped
    journal: dict[str, int] | None = None  # how long the journal's files are; None: not known

    @classmethod
    def fresh(cls, state: TrainState, config: Config) -> "Memory":
        """A beginning as the original's: another epoch, a new window, marks that count from here."""
        every = config.save_every_samples, config.val_every_samples
        return cls(
            Place(), Window(state.step), *(Marks(rows, state.samples + rows) for rows in every),
            Marks(config.check_replicas, state.step + config.check_replicas),
        )  # fmt: skip


def to_json(state: TrainState, memory: Memory, config: Config, data: dict[str, str], folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's run.json; `data` are the `contents` of the training files in `folder` when the run began."""
    return {
        "format": FORMAT,
        "step": state.step,
        "samples": state.samples,
        "devices": make_mesh(config).size,
        "options": {f.name: getattr(config, f.name) for f in fields(config)},
        "versions": versions(),
        "place": memory.place.to_json(folder),
        "window": memory.window.to_json(),
        "marks": {name: getattr(memory, name).to_json() for name in ("save", "validate", "replicas")},
        "warned": memory.warned,
        "skipped": memory.skipped,
        "owed": memory.owed,
        "bad_files": [name_in(folder, path) for path in memory.bad_files],
        "journal": memory.journal,
        "data": data,
    }


@functools.cache
def versions() -> dict[str, str]:
    """Looked up once, not at every save."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "numpy")}


def from_json(path: Path, run: dict[str, Any], config: Config, files: Sequence[Path], folder: Path) -> Memory:
    """The memory of a checkpoint at `path`. CheckpointError where options or data have changed in a way that matters, or it is damaged."""
    if run.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {run.get('format')}, but this version reads {FORMAT}: use the version that wrote it")
    if missing := sorted({"step", "samples", "devices", "options", "versions", "place", "window", "marks", "warned", "data"} - run.keys()):
        raise CheckpointError(f"{path}: run.json has no {', '.join(missing)}: it is not of this trainer")
    try:
        check_options(path, run["options"], config)
        memory = read_memory(run, config, folder)
        if memory.place.order and config.resume_order == "exact":
            finish_epoch(path, run, memory.place, config, files, folder)
    except (CheckpointError, DataError, ConfigError):
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: run.json holds something else than this trainer writes ({type(error).__name__}: {error})") from None
    return memory


def read_memory(run: dict[str, Any], config: Config, folder: Path) -> Memory:
    marks, journal = run["marks"], run.get("journal")
    if journal is not None:
        journal = {str(name): count(length) for name, length in journal.items()}
    every = {
        "save": (config.save_every_samples, run["samples"]),
        "validate": (config.val_every_samples, run["samples"]),
        "replicas": (config.check_replicas, run["step"]),
    }
    return Memory(
        Place.from_json(run["place"], folder),
        Window.from_json(run["window"]),
        **{name: Marks.from_json(marks[name], *now) for name, now in every.items()},
        warned=bool(run["warned"]),
        skipped=count(run.get("skipped", 0)),
        owed=bool(run.get("owed", False)),
        bad_files=[folder / name for name in run.get("bad_files", [])],
        journal=journal,
    )


def count(value) -> int:
    """`value`, which must be a whole number and not negative; a checkpoint may be damaged."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def finish_epoch(path: Path, run: dict[str, Any], place: Place, config: Config, files: Sequence[Path], folder: Path):
    """CheckpointError where the epoch that `place` stands in cannot be finished as it would have been."""
    rows = [rows_read(options) for options in (Config(**known(run["options"])), config)]
    if rows[0] != rows[1]:
        raise CheckpointError(
            f"{path}: it stands in an epoch that is read in batches of {rows[0]} rows, this run reads {rows[1]}: "
            "begin an epoch with --resume-order legacy"
        )
    names, present, saved = run["place"]["order"], named(files, folder), run["data"]
    # A file that was bad when the run was saved has no checksum; it may have been taken away since.
    left = [index for index, name in enumerate(names) if index < place.file or name in saved or name in present]
    place.order = [place.order[index] for index in left]
    check_data(path, saved, [names[index] for index in left if index >= place.file], present, folder, config.skip_bad_files)


def known(saved: dict[str, Any]) -> dict[str, Any]:
    """The saved options that this version has; how many devices there were does not matter where they are not asked for."""
    names = {f.name for f in fields(Config)} - {"data_parallel", "data_parallel_devices", "allow_changes"}
    return {name: value for name, value in saved.items() if name in names}


def check_options(path: Path, saved: dict[str, Any], config: Config):
    """CheckpointError naming every option whose change would change the run, with both values."""
    allowed = HARMLESS | set(config.allowed_changes)
    if config.lr_schedule == "constant":
        allowed |= {"max_training_samples"}
    if config.optimizer != "muon":
        allowed |= {name for name in saved if name.startswith("muon_")} - {"muon_target"}  # which the original refuses all the same
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


def check_data(path: Path, saved: dict[str, str], order: Sequence[str], present: dict[str, Path], folder: Path, skip: bool):
    """CheckpointError where a file of the epoch that is to be finished is gone (unless bad files are to be skipped) or has other content.

    A file without a checksum was bad when the run was saved: whatever it is now, it is read. New files wait for the next epoch.
    """
    for name in order:
        if name not in present:
            if skip:
                continue
            raise CheckpointError(f"{path}: {folder / name} is gone in the middle of its epoch: bring it back, or begin an epoch with --resume-order legacy")
        if name in saved and content_of(present[name]) != saved[name]:
            raise CheckpointError(
                f"{path}: {folder / name} has other content than when the run began, in the middle of its epoch: bring the old "
                "file back, or begin an epoch with --resume-order legacy"
            )


def named(files: Sequence[Path], folder: Path) -> dict[str, Path]:
    return {name_in(folder, path): path for path in files}


def contents(files: Sequence[Path], folder: Path) -> dict[str, str]:
    return {name: content_of(path) for name, path in named(files, folder).items()}


def content_of(path: Path) -> str:
    """A checksum of what an npz file holds, quick to have: its directory has the CRC-32 of every array."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = sorted((entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile) as error:  # it could be read a moment ago
        raise DataError(f"{path}: cannot be read any more ({error}): does somebody write to the data folder?") from None
    return f"{zlib.crc32(repr(entries).encode()):08x}-{sum(size for _, size, _ in entries)}"
