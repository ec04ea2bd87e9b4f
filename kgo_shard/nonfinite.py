"""A step that was not finite: what was first, in which rows of which file, and a tape of it that can be played again."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from . import augment, layout
from .batches import rows_read
from .checkpoint import save_checkpoint
from .config import Config
from .mesh import make_mesh
from .resume import HARMLESS
from .state import TrainState
from .step import Batch, NonfiniteError

FOLDER, FACTS, ROWS = "nonfinite", "nonfinite.json", "rows.npz"


class Finding(NamedTuple):
    """The first thing of a step that is not finite."""

    name: str  # "<stage>/<leaf>", as in a trace
    devices: list[int]  # on which; none: it is the same everywhere

    def __str__(self) -> str:
        stage, _, leaf = self.name.partition("/")
        kinds = {"loss_terms": f"loss term {leaf}", "raw_gradient": f"the gradient of {leaf}", "reduced_gradient": f"the reduced gradient of {leaf}"}
        return kinds.get(stage, "the gradient's norm") + (f" on device {', '.join(map(str, self.devices))}" if self.devices else "")


def find_first(stages: dict[str, np.ndarray]) -> Finding | None:
    """The first leaf of a step that is not finite, in the order of computation: loss terms (the loss is their sum), gradients, norm."""
    terms = sorted((name for name in stages if name.startswith("loss_terms/")), key=lambda name: name == "loss_terms/loss")
    gradients = [name for stage in ("raw_gradient/", "reduced_gradient/") for name in stages if name.startswith(stage)]
    for name in (*terms, *gradients, "norm"):
        finite = np.isfinite(np.asarray(stages[name], np.float32))
        if not finite.all():
            local = name.startswith(("loss_terms/", "raw_gradient/"))
            return Finding(name, np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1)).tolist() if local else [])
    return None


def explain(error: NonfiniteError, batch: Batch, where: tuple[Path, int], config: Config) -> NonfiniteError:
    """`error`, its message with the first bad term or leaf, the rows, and the folder with the tape of the step.

    `where` is the file of `batch` and its first row there.
    """
    path, start = where
    rows, step = range(start, start + rows_read(config)), error.state.step + 1
    found, kept = None, ""
    try:
        folder = write_tape(error, batch, config)
        found = play(folder)
        facts = {"step": step, "file": str(path), "rows": [rows[0], rows[-1]], "first": found and found._asdict()}
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        kept = f" Its tape is {folder}: kgo-shard replay {folder} --side new."
    except Exception as failed:  # whatever is wrong with the tape, the step is what the run ends for
        kept = f" Its tape could not be made ({failed or type(failed).__name__})."
    if found is not None and found.devices:
        share = config.batch_size // make_mesh(config).size
        rows = sorted({start + index % len(rows) for device in found.devices for index in range(device * share, (device + 1) * share)})
    what = str(found) if found else "something (finite when it was computed again stage by stage)"
    error.args = (
        f"step {step}: {what} is not finite, from rows {rows[0]} to {rows[-1]} of {path}. Nothing of it was saved.{kept} Go on with "
        "--on-nonfinite skip, which drops such updates, or with a lower --lr (and --allow-changes lr), or mend the rows (and --resume-order legacy).",
    )
    return error


def give_up_line(state: TrainState, calls: int, where: tuple[Path, int]) -> str:
    """What a run says that skips and skips."""
    return (
        f"step {state.step + 1}: {calls} calls in a row had no finite step, the last from row {where[1]} of {where[0]}: "
        "look at the rows, or lower --lr (and --allow-changes lr)"
    )


def write_tape(error: NonfiniteError, batch: Batch, config: Config) -> Path:
    """A folder beside the checkpoints with the state before the step, the rows as the step had them, and the options."""
    from .diff import recording  # the harness stands on the trainer, not the trainer on it
    from .diff.trace import Tape

    folder = Path(config.traindir) / FOLDER / f"{error.state.step + 1:08d}"
    if folder.exists():  # a run that was started again and stopped again: one tape is enough
        shutil.rmtree(folder)
    (folder / "train").mkdir(parents=True)
    rows = folder / "train" / ROWS
    np.savez_compressed(rows, **finished(batch, config))
    saved = folder / recording.CHECKPOINT
    save_checkpoint(saved, error.state, config)
    recording.write_tape(folder, Tape(options_of(config), [rows], 1, saved))
    return folder


def finished(batch: Batch, config: Config) -> Batch:
    """The rows of a batch after history and symmetry, in their stored dtypes; the planes unpacked."""
    expanded = jax.jit(augment.expand, static_argnames="pos_len")(batch, pos_len=config.pos_len)
    dtypes = {layout.PLANES: np.uint8} | {key: value.dtype for key, value in batch.items()}
    return {key: np.asarray(value).astype(dtypes[key]) for key, value in jax.device_get(expanded).items()}


def options_of(config: Config) -> dict[str, Any]:
    """The options of the tape: those that a step depends on and that are not the default, one step a call, rows as they are."""
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if getattr(config, f.name) != f.default and f.name not in HARMLESS}
    devices = make_mesh(config).size
    given |= {"data_parallel": config.data_parallel, "data_parallel_devices": devices if config.data_parallel else 0}
    return given | {"symmetry_type": "none", "enable_history_matrices": False, "steps_per_jit": 1, "allow_nonfull_mask": True}


def play(folder: Path) -> Finding | None:
    """What is first not finite in the step of a tape's folder, computed stage by stage."""
    from .diff import recording, shard_side

    side = shard_side.make_side(recording.read_tape(folder), probe_only=True)
    state = side.start()
    [batch] = next(side.chunks(lambda: state))
    return find_first(side.probe(state, batch)[1])
