"""Every planted fault against the clean old side: is it found, where, and would the loss curve have shown it?"""

import datetime
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import Progress

from . import compare, report, shard_side
from .faults import FAULTS, Fault
from .run import old_stack, record_shown
from .trace import Tape

STEPS = 3
DEVICES = 8  # of the tape on which all faults show
COLUMNS = ("fault", "planted", "found", "leaf", "leaves", "largest change of the loss", "printed loss", "verdict")


class Finding(NamedTuple):
    """What the harness said of one planted fault."""

    name: str
    fault: Fault
    comparison: compare.Comparison
    loss_change: float  # largest relative difference of the loss over the steps
    printed_alike: bool  # the log's four decimals of the loss are the same in every step

    @property
    def named(self) -> bool:
        """Whether the first difference is at the step and stage where the fault was planted."""
        bad = self.comparison.first_bad
        return bad is not None and (bad.step, bad.stage) == (self.fault.step, self.fault.stage)

    def row(self) -> list[str]:
        bad = self.comparison.first_bad
        found = "nowhere" if bad is None else f"step {bad.step}, {bad.stage}"
        failed = sum(not leaf.passed for leaf in self.comparison.leaves)
        return [
            self.fault.meaning,
            f"step {self.fault.step}, {self.fault.stage}",
            found,
            "" if bad is None else bad.leaf,
            f"{failed}/{len(self.comparison.leaves)}",
            f"{self.loss_change:.1e}" if self.loss_change else "none",
            "same" if self.printed_alike else "differs",
            "named" if self.named else "DIFFERENT: not where it was planted",
        ]


def run_faults(
    names: Iterable[str], options: dict, files: Sequence[Path], validation: Sequence[Path], progress: Progress | None = None
) -> Iterator[Finding]:
    """A Finding for each fault. Faults that need other options come with an old side of their own.

    Raises ValueError where old and new differ without any fault: nothing could be told then.
    """
    legacy_side = old_stack()
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(json.dumps([FAULTS[name].options, FAULTS[name].fresh], sort_keys=True), []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        for members in groups.values():
            tape = fit(Tape(options, files, STEPS, None, validation), FAULTS[members[0]], Path(folder))
            old = record_shown(legacy_side.make_side(tape, probe_only=True), tape, progress)
            clean = compare.compare(old, record_shown(shard_side.make_side(tape, probe_only=True), tape, progress))
            if not clean.equal:
                raise ValueError(f"old and new differ without a fault, with {FAULTS[members[0]].options}: {clean.verdict()}")
            for name in members:
                with FAULTS[name].plant():
                    new = record_shown(shard_side.make_side(tape, probe_only=True), tape, progress)
                yield Finding(name, FAULTS[name], compare.compare(old, new), *loss_curves(old, new))


def fit(tape: Tape, fault: Fault, folder: Path) -> Tape:
    """The tape with what the fault needs to show: its options, and a start in the middle of a run (written to `folder`)."""
    tape = tape._replace(options=tape.options | fault.options)
    if fault.fresh or tape.checkpoint:
        return tape
    path = folder / "checkpoint_jax.pkl"
    old_stack().save_middle(path, tape.options)
    return tape._replace(checkpoint=path)


def loss_curves(old: compare.Trace, new: compare.Trace) -> tuple[float, bool]:
    """Largest relative difference of the two losses, and whether their printed figures agree."""
    pairs = [(float(a["metrics/loss"]), float(b["metrics/loss"])) for a, b in zip(old[1:], new[1:], strict=True)]
    return max(abs(b - a) / abs(a) for a, b in pairs), all(f"{a:.4f}" == f"{b:.4f}" for a, b in pairs)


def faults_section(findings: Sequence[Finding]) -> dict:
    named, unseen = sum(found.named for found in findings), sum(found.printed_alike for found in findings)
    return {
        "title": "Planted faults",
        "text": f"Each replaces one function of the new side for {STEPS} steps. Old and new were equal in every bit without any.",
        "columns": list(COLUMNS),
        "rows": [found.row() for found in findings],
        "verdict": f"{'PASSED' if named == len(findings) else 'FAILED'}: {named} of {len(findings)} named at the step and stage where they "
        f"were planted; the printed loss of {unseen} is the same in all digits",
        "image_png": None,
    }


def write_json(path: Path, findings: Sequence[Finding], shard_state: str = "none"):
    """Add the findings to a results file, one entry for each fault; a file of another JAX or another `shard_state` is replaced."""
    environment, entries = report.environment_facts() | {"shard_state": shard_state}, {}
    if path.exists():
        kept = json.loads(path.read_text())
        same = all(kept["environment"].get(name) == environment[name] for name in ("JAX", "shard_state"))
        entries = kept["faults"] if same else {}
    for found in findings:
        bad = found.comparison.first_bad
        entries[found.name] = {
            "meaning": found.fault.meaning,
            "planted": {"step": found.fault.step, "stage": found.fault.stage},
            "found": None if bad is None else {"step": bad.step, "stage": bad.stage, "leaf": bad.leaf, "reason": bad.reason},
            "named": found.named,
            "commit": environment["commit"],
            "date": datetime.date.today().isoformat(),
            "largest relative change of the loss": float(np.float64(found.loss_change)),
            "printed loss": "same" if found.printed_alike else "differs",
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "steps": STEPS, "faults": entries}, indent=1) + "\n")
