"""The run's own checkpoints: written by Orbax beside the training, complete or not there, each file with its checksum.

    TRAINDIR/checkpoints/00000040/     after step 40; several are kept
        state/                         every leaf in a folder of its own, named by its path (params.blocks.0.q_proj.w)
        run.json                       counts, options, versions, place in the data, log window, marks, checksums of the data files
        checksums.json                 SHA-256 of every other file

A checkpoint is written as `00000040.tmp` and renamed when it is whole, so one that can be seen is complete; one that was damaged
afterwards is known by its checksums, and the one before it is used.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

# It tells of every save that nothing had to be merged.
logging.getLogger("absl").setLevel(logging.ERROR)

FOLDER = "checkpoints"
FORMER = ".former"  # a checkpoint of a step that is saved again, until the new one has its name
RUN, CHECKSUMS, STATE = "run.json", "checksums.json", "state"
Tree = dict[str, Any]  # nested dicts of arrays


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, the thing and the remedy."""


class Store:
    """The checkpoints of one run folder. One save is under way at a time, in a thread of its own."""

    def __init__(self, traindir: Path, keep: int):
        self.folder, self.keep = traindir / FOLDER, keep
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.saving: tuple[Path, Future] | None = None

    def save(self, step: int, state: Tree, run: dict[str, Any]):
        """Begin to write a checkpoint; returns as soon as that is under way. The arrays must not be donated before `wait`.

        Raises CheckpointError where the save before this one failed; what was complete is still there.
        """
        self.wait()
        path = self.folder / f"{step:08d}"
        self.saving = path, self.thread.submit(write, path, state, run)

    def wait(self):
        """Until the save that is under way is complete, older ones than `keep` then removed. Raises CheckpointError if it failed."""
        if self.saving is None:
            return
        (path, future), self.saving = self.saving, None
        try:
            future.result()
        except Exception as error:  # Orbax and TensorStore raise many kinds
            shutil.rmtree(unfinished(path), ignore_errors=True)
            reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
            before = next(iter(complete(self.folder)), None)
            kept = f"{before} is whole" if before else "there is none from before"
            raise CheckpointError(f"{path}: cannot be saved ({reason}); {kept}: make room, or give another --traindir") from None
        done = [old for old in complete(self.folder) if int(old.name) <= int(path.name)]
        for old in done[self.keep :]:
            try:
                remove(old)
            except OSError as error:
                print(f"warning: {old}: an old checkpoint cannot be removed ({error.strerror})", file=sys.stderr)

    def close(self):
        try:
            self.wait()
        finally:
            self.thread.shutdown()


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, the newest first."""
    found = [path for path in folder.glob("[0-9]*") if path.name.isdecimal() and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def set_aside(folder: Path, after: int) -> list[Path]:
    """Renames the checkpoints of steps after `after`, which a run that starts there could not use; what they are called now."""
    moved = []
    for path in complete(folder):
        if int(path.name) > after:
            moved.append(path.rename(spare_name(path, "unused")))
    return moved


def spare_name(path: Path, word: str) -> Path:
    """The first of NAME.word1, NAME.word2, ... that is free: for what is kept, but must make room."""
    return next(to for n in itertools.count(1) if not (to := path.with_name(f"{path.name}.{word}{n}")).exists())


def unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def clear_unfinished(folder: Path):
    """Remove what a killed run left behind. Only for the run that holds the folder."""
    for path in folder.glob(f"*{FORMER}"):  # killed between the two renames of `write`: the older of the two has its name back
        if not (whole := path.with_name(path.name.removesuffix(FORMER))).exists():
            path.rename(whole)
    for path in (*folder.glob("*.tmp"), *folder.glob(f"*{FORMER}")):
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path):
    """So that it is never seen in part: renamed first."""
    gone = path.with_name(path.name + ".gone.tmp")  # cleared with what a killed save left
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def write(path: Path, state: Tree, run: dict[str, Any]):
    """The whole checkpoint, on the disk before it gets its name."""
    whole = unfinished(path)
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(parents=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save((whole / STATE).absolute(), args=ocp.args.PyTreeSave(jax.tree.map(one_copy, state)))
    (whole / RUN).write_text(json.dumps(run, indent=1) + "\n")
    sums = {str(file.relative_to(whole)): checksum(file) for file in sorted(whole.rglob("*")) if file.is_file()}
    (whole / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n")
    for file in (*whole.rglob("*"), whole):
        sync(file)
    former = path.with_name(path.name + FORMER)
    if path.exists():  # the same step again, after an older checkpoint was chosen or a bad file was met again
        shutil.rmtree(former, ignore_errors=True)
        path.rename(former)
    whole.rename(path)
    sync(path.parent)
    sync(path.parent.parent)
    shutil.rmtree(former, ignore_errors=True)


def one_copy(leaf):
    """A replicated array as its first device's copy: Orbax would write a part of every device's."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return leaf


def checksum(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(path: Path):
    """What was written is on the disk, not only on its way."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> tuple[Tree, dict[str, Any]]:
    """(state, run.json) of one checkpoint, the arrays on the host. Raises CheckpointError naming what is damaged."""
    try:
        return read_checked(path)
    except CheckpointError:
        raise
    except Exception as error:  # checksums agree, and yet it is no checkpoint: Orbax and TensorStore raise many kinds
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None


def read_checked(path: Path) -> tuple[Tree, dict[str, Any]]:
    try:
        sums = json.loads((path / CHECKSUMS).read_text())
        names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {CHECKSUMS}
        if not isinstance(sums, dict) or RUN not in sums:
            raise ValueError(f"{CHECKSUMS} holds no checksum of {RUN}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {CHECKSUMS} cannot be read ({error}): the checkpoint is damaged") from None
    for name in sorted(sums.keys() | names):
        if name not in names or name not in sums or checksum(path / name) != sums[name]:
            what = "is missing" if name not in names else "is not the checkpoint's" if name not in sums else "was changed: its checksum is another"
            leaf = name.split("/")[1] if name.startswith(STATE + "/") and name.count("/") > 1 else name
            raise CheckpointError(f"{path}: {leaf} {what}")
    check_sizes(path / STATE)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        folder = (path / STATE).absolute()
        shapes = checkpointer.metadata(folder).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        state = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=arguments))
    run = json.loads((path / RUN).read_text())
    if not (isinstance(run, dict) and isinstance(run.get("step"), int)):
        raise CheckpointError(f"{path}: {RUN} names no step: it is not of this trainer")
    return state, run


def check_sizes(state: Path):
    """ValueError naming a leaf whose header promises more than this machine can hold: TensorStore would end the process, not raise."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for header in state.glob("*/.zarray"):
        content = json.loads(header.read_text())
        shape, chunks, dtype = (content[name] for name in ("shape", "chunks", "dtype"))
        if not all(type(edge) is int and edge >= 0 for edge in (*shape, *chunks)) or any(chunk > max(edge, 1) for chunk, edge in zip(chunks, shape, strict=True)):
            raise ValueError(f"{header.parent.name}: shape {shape} in chunks of {chunks}")
        room -= math.prod(shape) * np.dtype(dtype).itemsize
        if room < 0:
            raise ValueError(f"{header.parent.name}: with shape {shape} of {dtype} the state is larger than this machine's memory")


def newest(folder: Path, warn) -> Iterator[tuple[Path, Tree, dict[str, Any]]]:
    """The readable checkpoints, the newest first; `warn` is told of those that are damaged."""
    for path in complete(folder):
        try:
            yield path, *read(path)
        except CheckpointError as error:
            warn(f"{error}; the one before it is tried")
