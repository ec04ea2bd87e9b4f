"""A tape and a trace in a folder, so that one interpreter's run can be compared with another's.

    tape.json             options, training and validation files, steps
    checkpoint_jax.pkl    where the run starts
    trace.npz             every leaf of every step, "<step>/<stage>/<leaf>"; bfloat16 as uint16, which NumPy's files can hold
    facts.json            who made the trace: side, JAX, exact mode or not; and which leaves are bfloat16

Needs NumPy and ml_dtypes alone, so that it also runs beside a JAX that kgo_shard does not support.
"""

import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from .trace import Tape, Trace

CHECKPOINT = "checkpoint_jax.pkl"
# The compiler then neither fuses nor contracts a multiply and an add: equal arithmetic gives equal bits.
EXACT_FLAGS = ("--xla_disable_hlo_passes=fusion", "--xla_cpu_max_isa=SSE4_2")
# Since 0.10 YNNPACK's kernels fuse on their own, squares into their sum, say: in one program, and in another with that sum not.
WITHOUT_YNNPACK = "--xla_cpu_experimental_ynn_fusion_type="


class RecordingError(ValueError):
    """A folder that is not a recording; the message names the file."""


def exact_flags() -> tuple[str, ...]:
    """The compiler flags of exact mode for this interpreter's JAX; a flag that XLA does not know would end the process."""
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    return (*EXACT_FLAGS, WITHOUT_YNNPACK) if (int(major), int(minor)) >= (0, 10) else EXACT_FLAGS


def is_exact() -> bool:
    """Whether this process has the compiler flags of exact mode; those that every version has."""
    return set(EXACT_FLAGS) <= set(os.environ.get("XLA_FLAGS", "").split())


def facts_here(side: str) -> dict:
    """Who makes a trace in this process."""
    import jax

    return {"side": side, "JAX": jax.__version__, "Python": sys.version.split()[0], "exact": is_exact()}


def write_tape(folder: Path, tape: Tape):
    """The tape, its start copied into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if tape.checkpoint is None:
        raise RecordingError("a tape that is recorded needs a checkpoint to start from: another interpreter may draw other numbers from the seed")
    if tape.checkpoint != folder / CHECKPOINT:
        shutil.copyfile(tape.checkpoint, folder / CHECKPOINT)
    files = {name: [seen_from(folder, Path(path)) for path in getattr(tape, name)] for name in ("files", "validation")}
    content = {"options": tape.options, "steps": tape.steps} | files
    (folder / "tape.json").write_text(json.dumps(content, indent=1) + "\n")


def seen_from(folder: Path, path: Path) -> str:
    """The path of a file in the folder from there, so that the folder may be moved; of another the whole path."""
    path, folder = path.resolve(), folder.resolve()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def read_tape(folder: Path) -> Tape:
    try:
        content = json.loads((folder / "tape.json").read_text())
        if not isinstance(content["options"], dict):
            raise ValueError("options are not a table")
        files, validation = ([folder / path for path in content[name]] for name in ("files", "validation"))
        return Tape(content["options"], files, content["steps"], folder / CHECKPOINT, validation)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise RecordingError(f"{folder / 'tape.json'}: not a tape ({reason}): name a folder that kgo-shard record wrote") from None


def write_trace(folder: Path, trace: Trace, facts: dict):
    arrays = {f"{step}/{name}": np.asarray(leaf) for step, stages in enumerate(trace) for name, leaf in stages.items()}
    bfloat16 = [name for name, leaf in arrays.items() if leaf.dtype == ml_dtypes.bfloat16]
    np.savez_compressed(folder / "trace.npz", **arrays | {name: arrays[name].view(np.uint16) for name in bfloat16})
    (folder / "facts.json").write_text(json.dumps(facts | {"bfloat16": bfloat16}, indent=1) + "\n")


def read_trace(folder: Path) -> tuple[Trace, dict]:
    """The trace and the facts about it. Raises RecordingError naming a file that is missing or damaged."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        # Opened here: NumPy leaves a damaged file open.
        with open(folder / "trace.npz", "rb") as file, np.load(file) as content:
            arrays = {name: content[name] for name in content}
        arrays |= {name: arrays[name].view(ml_dtypes.bfloat16) for name in facts["bfloat16"]}
        for name in ("side", "JAX", "exact"):
            if name not in facts:
                raise KeyError(name)
    except Exception as error:  # a damaged zip raises whatever its bytes happen to mean
        raise RecordingError(f"{folder}: not a recorded trace ({type(error).__name__}: {error})") from None
    trace: Trace = []
    for name, leaf in arrays.items():
        step, _, key = name.partition("/")
        while len(trace) <= int(step):
            trace.append({})
        trace[int(step)][key] = leaf
    return trace, facts
