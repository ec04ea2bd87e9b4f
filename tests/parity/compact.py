"""Recordings of the original in a form small enough to travel with the tests: a run's first and last state and its reference.

    python -m tests.parity.compact --dumps DIR     with the dumps of `tests.parity.recordings --dumps DIR --cases ...`, as below

The rows of the recorded runs are the first ones of tests/data/selfplay9/train/data0.npz. What a float64 run of the old stack came to
(the reference of the three-way bound) is kept as its distance from the recording, as float16 times a scale for each leaf: it is
needed to a few digits only.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from .legacy.replay_recording import read_case, read_recorded_state
from .recordings import REFERENCE, TRACES, Arrays, read_replay

FOLDER = Path(__file__).parents[1] / "data" / "recordings"
ROWS = Path(__file__).parents[1] / "data" / "selfplay9" / "train" / "data0.npz"
CASES = ("adamw_f32/exact", "muon_attn_allbf16/exact", "stacked_muon_ffn_d16/exact")  # pytest runs in exact mode


class Recording(NamedTuple):
    """One recorded run, its states under `to_host`'s names."""

    case: dict  # devices, steps, flags ...
    meta: dict  # of the first checkpoint
    first: Arrays
    last: Arrays
    reference: Arrays  # the last state in float64


def path_of(case: str) -> Path:
    return FOLDER / f"{case.partition('/')[0]}.npz"


def load(case: str) -> Recording:
    with np.load(path_of(case)) as file:
        content = {name: file[name] for name in file}
    facts = json.loads(str(content.pop("facts")))
    for name in facts["bfloat16"]:
        content[name] = content[name].view(ml_dtypes.bfloat16)

    def below(prefix):
        return {name.removeprefix(prefix): x for name, x in content.items() if name.startswith(prefix)}

    last, error, scale = below("last/"), below("error/"), below("scale/")
    reference = {name: x if name not in error else x.astype(np.float64) + scale[name] * error[name].astype(np.float64) for name, x in last.items()}
    return Recording(facts["case"], facts["meta"], below("first/"), last, reference)


def cut(case: str, traces: Path, dumps: Path) -> int:
    """Writes one file; returns its bytes."""
    settings, folder, _ = read_case(traces / case)
    kept = sorted(folder.glob("step_*.pkl"))
    (first, meta), (last, _) = read_recorded_state(kept[0]), read_recorded_state(kept[-1])
    reference, _ = read_replay(dumps, case, REFERENCE)
    content = {f"first/{name}": x for name, x in first.items()} | {f"last/{name}": x for name, x in last.items()}
    for name, x in last.items():
        if np.issubdtype(x.dtype, np.integer):
            continue
        error = reference[f"{kept[-1].stem}/{name}"] - x.astype(np.float64)
        scale = np.abs(error).max() or 1.0
        content |= {f"scale/{name}": np.float64(scale), f"error/{name}": (error / scale).astype(np.float16)}
    bfloat16 = [name for name, x in content.items() if x.dtype == ml_dtypes.bfloat16]
    facts = {"case": settings, "meta": meta, "bfloat16": bfloat16}
    content |= {name: content[name].view(np.uint16) for name in bfloat16} | {"facts": np.array(json.dumps(facts))}
    path = path_of(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **content)
    return path.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--dumps", type=Path, required=True)
    arguments = parser.parse_args()
    for case in CASES:
        print(f"{case}: {cut(case, arguments.traces, arguments.dumps)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
