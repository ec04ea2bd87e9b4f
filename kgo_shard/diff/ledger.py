"""Every piece of state of a training run: who owns it, what it is, where it lives, whether it is saved and compared.

The rows of the device state are looked up in the state itself, so a new leaf needs a row; the host loop's are told by hand,
and a test holds them against the names that the loop's functions really have.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

import jax

from .. import mesh
from ..config import Config
from ..state import TrainState, learned_shapes
from .trace import state_stages

COLUMNS = ("state", "owner", "dtype", "leaves", "elements", "placement", "saved", "compared as")


class DeviceRow(NamedTuple):
    """Leaves of TrainState under one pattern of their paths."""

    pattern: str
    state: str
    saved: str  # where in checkpoint_jax.pkl
    compared: str  # stage of a trace


class HostRow(NamedTuple):
    """State of the host loop; `names` are the local variables and attributes that hold it."""

    state: str
    owner: str
    names: tuple[str, ...]
    kind: str
    saved: str
    compared: str


DEVICE_ROWS = (
    DeviceRow(".learned.net*", "parameters (with --master-dtype the master copies)", "params", "parameters"),
    DeviceRow(".learned.opt_state.m*", "first moments, Muon's momenta", "opt_state/m", "moments"),
    DeviceRow(".learned.opt_state.v*", "second moments (Muon's leaves: scalar zeros)", "opt_state/v", "moments"),
    DeviceRow(".learned.ema*", "moving average of the parameters", "ema_params", "ema"),
    DeviceRow(".learned.statistics.sum", "moving sum of the seki weight", "meta/moving_sum", "moving_statistics"),
    DeviceRow(".learned.statistics.weight", "moving weight of the seki weight", "meta/moving_weight", "moving_statistics"),
    DeviceRow(".step", "optimizer steps: also the position in the schedule and Adam's t", "meta/step", "counts, learning_rate"),
    DeviceRow(".samples", "rows trained on", "meta/samples", "counts"),
)
# In the own format; the original's file has none of it, and a run that is resumed from it begins an epoch and a window of its own.
HOST_ROWS = (
    HostRow("random draws (symmetry, history)", "batches.Place", ("rand", "seed"), "NumPy generator", "place/rand", "batch"),
    HostRow("order of the files", "batches.Place", ("order", "place", "batches"), "seeded with seed + step", "place/order", "batch"),
    HostRow("place in the files", "batches.Place", ("file", "batch", "path", "rows", "num_rows", "start", "resumed"), "file, batch", "place/file, place/batch", "batch"),
    HostRow("where the last batches' rows are", "batches.Place", ("last", "taken"), "files and rows", "no: only for messages", "no: only for messages"),
    HostRow(
        "window of the log", "journal.Window", ("window", "sums", "start_step", "start_time", "learning_rate"), "float32 sums",
        "window", "lines of the log",
    ),
    HostRow("length of the log's files", "resume.Memory", ("journal",), "bytes", "journal", "lines of the log"),
    HostRow("times of the window", "journal.StepTimes", ("times", "data", "host_submit", "train_wait", "steps"), "seconds", "no: starts anew", "no: times"),
    HostRow("next save, validation and check", "resume.Marks", ("next", "every"), "rows, steps", "marks", "lines of the log"),
    HostRow("the same", "resume.Memory", ("save", "validate", "replicas", "place", "window"), "", "marks, place, window", "see their own rows"),
    HostRow("warned of small boards", "resume.Memory", ("warned",), "bool", "warned", "lines on stderr"),
    HostRow("updates that were skipped", "resume.Memory", ("skipped",), "int", "skipped", "lines on stderr"),
    HostRow("calls without a finite step", "train.train", ("fruitless",), "int", "no: starts anew", "no: ends a run"),
    HostRow("a validation that was interrupted", "resume.Memory", ("owed",), "bool", "owed", "lines of the log"),
    HostRow("files that were bad", "resume.Memory", ("bad_files", "bad"), "files", "bad_files", "lines of the log"),
)  # fmt: skip


def device_row(path: str) -> DeviceRow:
    """The row of a leaf of TrainState. KeyError naming a leaf that has none."""
    for row in DEVICE_ROWS:
        if fnmatchcase(path, row.pattern):
            return row
    raise KeyError(f"{path} has no row in DEVICE_ROWS: say whether it is saved and where it is compared")


def ledger_rows(config: Config) -> list[list[str]]:
    """The table for a run with these options, the device state first."""
    state = TrainState(learned_shapes(config), step=0, samples=0)
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
    rows = []
    for row in DEVICE_ROWS:
        mine = [(path, leaf) for path, leaf in leaves if device_row(path) is row]
        if not mine:
            rows.append([row.state, "TrainState" + row.pattern.rstrip("*"), "", "0", "0", "", "no: this run has none", "no: this run has none"])
            continue
        on_device = row.pattern.startswith(".learned")
        dtypes = sorted({str(leaf.dtype) if on_device else "int" for _, leaf in mine})
        places = sorted({str(mesh.spec_for(f"{mesh.state_kind(config)}/{path}", leaf)) if on_device else "host" for path, leaf in mine})
        elements = sum(leaf.size if on_device else 1 for _, leaf in mine)
        rows.append([
            row.state, "TrainState" + row.pattern.rstrip("*"), ", ".join(dtypes), str(len(mine)), f"{elements:,}", ", ".join(places),
            row.saved, row.compared,
        ])  # fmt: skip
    return rows + [[row.state, row.owner, row.kind, "", "", "host", row.saved, row.compared] for row in HOST_ROWS]


def ledger_section(config: Config) -> dict:
    return {
        "title": "State ledger",
        "text": "Everything that a run remembers from one step to the next.",
        "columns": list(COLUMNS),
        "rows": ledger_rows(config),
        "verdict": "",
        "image_png": None,
    }


def stage_of(name: str) -> str:
    """The stage under which a leaf of `to_host` is compared."""
    return next(iter(state_stages({name: 0}))).partition("/")[0]
