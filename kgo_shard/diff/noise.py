"""The noise floor: how far the old side lies from itself where only rounding is changed.

Two changes that no correct program can avoid: every start parameter moved by one unit in the last place, up or down at random,
and the devices' shares of every batch in reverse order, so that sums over the devices run the other way round.
"""

from rich.progress import Progress

from . import compare
from .run import old_stack, record_shown
from .trace import Side, Tape, Trace

COLUMNS = ("stage", "one ulp in the parameters", "devices in reverse order", "old against new", "verdict")


def measure(tape: Tape, side: Side, plain: Trace, progress: Progress | None = None) -> dict[str, compare.Comparison]:
    """{"perturbed": ..., "reordered": ...}: the trace `plain` of the old side (which only probes) against the old side, changed so."""
    legacy_side = old_stack()
    sides = {"perturbed": legacy_side.make_perturbed(side, tape), "reordered": legacy_side.make_reordered(side, tape)}
    return {name: compare.compare(plain, record_shown(side, tape, progress)) for name, side in sides.items()}


def largest(comparison: compare.Comparison) -> dict[str, float]:
    """Stage -> the largest relative norm of a leaf's difference, over all steps after the start."""
    found: dict[str, float] = {}
    for leaf in comparison.leaves:
        if leaf.step > 0 and leaf.relative_norm is not None:
            found[leaf.stage] = max(found.get(leaf.stage, 0.0), leaf.relative_norm)
    return found


def noise_section(noise: dict[str, compare.Comparison], old_new: compare.Comparison) -> dict:
    """The floor beside what lies between old and new on the same tape."""
    perturbed, reordered, between = (largest(c) for c in (noise["perturbed"], noise["reordered"], old_new))
    rows, above = [], []
    for stage in compare.STAGES:
        if stage in between:
            floor = max(perturbed.get(stage, 0.0), reordered.get(stage, 0.0))
            word = "equal" if between[stage] == 0 else "within noise" if between[stage] <= floor else "above the noise"
            above += [stage] if word == "above the noise" else []
            rows.append([stage, f"{perturbed.get(stage, 0.0):.1e}", f"{reordered.get(stage, 0.0):.1e}", f"{between[stage]:.1e}", word])
    return {
        "title": "Noise floor",
        "text": "The old side against itself where only rounding is changed, and old against new on the same steps. Largest relative norm "
        "of a leaf.",
        "columns": list(COLUMNS),
        "rows": rows,
        "verdict": "old against new lies within the noise in every stage" if not above else "above the noise in " + ", ".join(above),
        "image_png": None,
    }
