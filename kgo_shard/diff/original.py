"""Recordings of the original stack as tapes: a case's folder, or the `exact` folder in it.

    case.json        the command line (`flags`), the dtype of matrix products (`compute`), devices, steps, the data folder (`datadir`)
    step_NNNN.pkl    the original's checkpoint after step N; step 0 is where the run starts

A run is one epoch from step 0 over the data folder's training files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from .. import convert
from ..checkpoint import read_pickle
from ..config import Config, Parser, add_options
from .recording import RecordingError
from .trace import Tape, Trace, state_stages


def is_original(folder: Path) -> bool:
    return (folder / "case.json").is_file()


def read_case(folder: Path) -> dict[str, Any]:
    path = folder / "case.json"
    try:
        case = json.loads(path.read_text())
        plain = {"datadir": str(case["datadir"]), "compute": str(case["compute"]), "jax": str(case.get("jax", "unknown"))}
        return plain | {"flags": [*map(str, case["flags"])], "devices": int(case["devices"]), "steps": int(case["steps"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"{path}: not a recorded case ({type(error).__name__}: {error})") from None


def read_tape(folder: Path, datadir: Path | None = None) -> Tape:
    """The case's tape. `datadir` in the case is relative to a folder above; RecordingError where none has it."""
    case = read_case(folder)
    if datadir is None:
        datadir = next((above / case["datadir"] for above in folder.resolve().parents if (above / case["datadir"]).is_dir()), None)
    if datadir is None:
        raise RecordingError(f"{folder}: no folder above has its data, {case['datadir']}: say where they are with --datadir")
    parser = Parser(prog=str(folder / "case.json"))
    add_options(parser)
    options = vars(parser.parse_args(case["flags"])) | {"compute_dtype": case["compute"]}
    if case["devices"] > 1:
        options |= {"data_parallel": True, "data_parallel_devices": case["devices"]}
    Config(**options)
    files = sorted((datadir / "train").glob("*.npz"))
    if not files:
        raise RecordingError(f"{datadir / 'train'}: holds no npz files: say where the data are with --datadir")
    return Tape(options, files, max(kept_steps(folder)), folder / "step_0000.pkl")


def kept_steps(folder: Path) -> list[int]:
    steps = sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_[0-9][0-9][0-9][0-9].pkl"))
    if steps[:1] != [0] or len(steps) < 2:
        raise RecordingError(f"{folder}: holds the states {steps}: step_0000.pkl and a later one are needed")
    return steps


def read_trace(folder: Path) -> tuple[list[int], Trace, dict[str, Any]]:
    """(steps that were kept, the states after them, facts). The pickles are read by the reader that runs no code."""
    steps = kept_steps(folder)
    states = [state_stages(read_state(folder / f"step_{step:04d}.pkl")) for step in steps]
    return steps, states, {"side": "the original", "JAX": read_case(folder)["jax"], "exact": folder.name == "exact"}


def read_state(path: Path) -> dict[str, np.ndarray]:
    """A checkpoint's leaves under `to_host`'s names."""
    content = read_pickle(path)
    meta = content.pop("meta")
    if missing := {"moving_sum", "moving_weight", "step", "samples"} - meta.keys():
        raise RecordingError(f"{path}: meta has no {', '.join(sorted(missing))}")
    flat = {name: np.asarray(leaf) for name, leaf in convert.flatten(content).items()}
    flat |= {name: np.float32(meta[name]) for name in ("moving_sum", "moving_weight")}
    return flat | {name: np.int64(meta[name]) for name in ("step", "samples")}
