"""A run recorded in a folder, and its tape played again: by either side, later, elsewhere, or under another interpreter.

A recording outlives what made it: the new side can be compared with the old stack after that was deleted. The folder is one that
`record` wrote, or one that was kept of the original itself (`original.py`).
"""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from .. import nonfinite
from ..checkpoint import save_checkpoint
from ..config import Config, ConfigError
from ..nonfinite import Finding
from ..state import init_state
from . import compare, original, recording, run, shard_side
from .trace import STATE_STAGES, Tape, Trace


class Replay(NamedTuple):
    """What was recorded, what was made of the same tape now, and the verdict."""

    recorded: dict[str, Any]  # facts: side, JAX, exact
    replayed: dict[str, Any]
    bits: bool  # equal bits were demanded, not the three-way bound
    comparison: compare.Comparison


class Player(NamedTuple):
    """Who plays a tape: a side, here or under another interpreter."""

    side: str = "old"
    python: str | None = None
    exact: bool = False  # under the other interpreter; here the process is what it is
    progress: Progress | None = None

    def play(self, folder: Path, tape: Tape, probe_only: bool = False) -> tuple[Trace, dict[str, Any]]:
        """The trace of the tape (which is also written in `folder`) and the facts about it; with `probe_only` without the training step's."""
        if self.python is not None:
            if self.side != "old":
                raise ConfigError(f"--python runs the old side only; for the new one run {self.python} -m kgo_shard replay ... --side new")
            return run.run_elsewhere(self.python, folder, self.exact)
        side = (run.old_stack() if self.side == "old" else shard_side).make_side(tape, probe_only)
        return run.record_shown(side, tape, self.progress), recording.facts_here(side.name)


def record(folder: Path, tape: Tape, player: Player) -> dict[str, Any]:
    """Writes the tape, its start and the trace; returns the facts. Raises RecordingError where the folder holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise recording.RecordingError(f"{folder}: is there and not an empty folder: name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    if tape.checkpoint is None:
        config = Config(**tape.options)
        tape = tape._replace(checkpoint=folder / recording.CHECKPOINT)
        save_checkpoint(tape.checkpoint, init_state(config), config)
    recording.write_tape(folder, tape)
    trace, facts = player.play(folder, recording.read_tape(folder))
    recording.write_trace(folder, trace, facts)
    return facts


def read_tape(folder: Path, datadir: Path | None = None) -> Tape:
    """The tape of a folder; its files from `datadir` where they are no longer in their place. Raises RecordingError."""
    tape = original.read_tape(folder, datadir) if original.is_original(folder) else recording.read_tape(folder)
    if datadir is not None:
        moved = {"files": "train", "validation": "val"}
        tape = tape._replace(**{name: [datadir / part / path.name for path in getattr(tape, name)] for name, part in moved.items()})
    if gone := next((path for path in (*tape.files, *tape.validation) if not path.is_file()), None):
        raise recording.RecordingError(f"{folder}: its tape reads {gone}, which is not there: say where the data are with --datadir")
    return tape


def replay(folder: Path, tape: Tape, player: Player) -> Replay:
    """Plays the folder's tape and compares it with the folder's trace.

    Equal bits are demanded of two runs in exact mode on one JAX; anything else, and what was recorded with the original on another
    machine, is judged by the three-way bound against a float64 run here. Raises RecordingError naming a file that is damaged.
    """
    kept, steps = original.is_original(folder), None
    if kept:
        steps, recorded, facts = original.read_trace(folder)
    else:
        recorded, facts = recording.read_trace(folder)
    with tempfile.TemporaryDirectory() as name:
        recording.write_tape(Path(name), tape)
        trace, ours = player.play(Path(name), tape)
    bits = facts["exact"] and ours["exact"] and facts["JAX"] == ours["JAX"] and not kept
    if bits:
        return Replay(facts, ours, True, compare.compare(recorded, trace))
    bound = run.measure_bound(tape, run.old_stack().make_side(tape), player.progress)
    if kept:
        trace, reference, *noise = ([states_only(part[step]) for step in steps] for part in (trace, bound.reference, *bound.noise))
        bound = bound._replace(reference=reference, noise=noise)
    return Replay(facts, ours, False, bound.judge(recorded, trace, steps))


class Nonfinite(NamedTuple):
    """What was first not finite in a step that stopped a run, and what is in the same step now."""

    facts: dict[str, Any]  # step, file, rows
    recorded: Finding | None
    found: Finding | None
    stages: dict[str, Any]

    @property
    def reproduced(self) -> bool:
        return self.found is not None and self.found == self.recorded

    def verdict(self) -> str:
        if self.found is None:
            return "NOT REPRODUCED: every term and every gradient of the step is finite here"
        return f"{'REPRODUCED' if self.reproduced else 'OTHERWISE'}: {self.found} is not finite" + ("" if self.reproduced else f", recorded was {self.recorded or 'nothing'}")


def replay_nonfinite(folder: Path, tape: Tape, player: Player) -> Nonfinite:
    """Plays the step of a tape that the trainer wrote before it stopped. Raises RecordingError naming a file that is damaged."""
    path = folder / nonfinite.FACTS
    try:
        facts = json.loads(path.read_text())
        recorded = facts["first"] and Finding(facts["first"]["name"], facts["first"]["devices"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise recording.RecordingError(f"{path}: not the facts of a step ({type(error).__name__}: {error})") from None
    with tempfile.TemporaryDirectory() as name:
        recording.write_tape(Path(name), tape)
        trace, _ = player.play(Path(name), tape, probe_only=True)
    return Nonfinite(facts, recorded, nonfinite.find_first(trace[1]), trace[1])


def states_only(step: dict) -> dict:
    """The leaves of the state: of the original nothing else was kept at every step."""
    stages = tuple(stage for _, stage in STATE_STAGES)
    return {name: leaf for name, leaf in step.items() if name.startswith(stages)}


def describe(facts: dict[str, Any]) -> str:
    return f"{facts['side']}, JAX {facts['JAX']}, {'exact' if facts['exact'] else 'default'} mode"
