"""The whole story on the shipped rows: mesh check, both stacks compared, the naive port caught, the objective audited, a run."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..batches import find_files, read_packed_batches
from ..config import Config
from ..state import init_state
from . import audit, compare, mesh_check, report, run, shard_side
from .faults import FAULTS
from .trace import Side, Tape

DEVICES = 8
STEPS = 5
RUN_STEPS = 30
FAULT = "naive_port"


def run_demo(folder: Path, sample: Path, options: dict, console: Console) -> int:
    """Run all parts, show them as they come, write the report. 0 if everything is as it should be, else 1."""
    legacy_side = run.old_stack()
    options = options | {"log_grad_norm": True, "data_parallel": True, "data_parallel_devices": DEVICES}
    tape = Tape(options, find_files(sample / "train"), STEPS)
    started = time.perf_counter()
    with Progress(console=console, transient=True) as progress:

        def recorded(side):
            return run.record_shown(side, tape, progress)

        check = mesh_check.check_mesh(DEVICES)
        console.print(f"1. mesh: {check.verdict()}", highlight=False)

        old, new = legacy_side.make_side(tape), shard_side.make_side(tape)
        old_trace = recorded(old)
        comparison = compare.compare(old_trace, recorded(new))
        console.print(f"2. {STEPS} steps, old against new: {comparison.verdict()}", highlight=False)

        with FAULTS[FAULT].plant():
            faulty = compare.compare(old_trace, recorded(shard_side.make_side(tape)))
        console.print(f"3. the naive port ({FAULTS[FAULT].meaning}): {faulty.verdict()}", highlight=False)
        caught = faulty.first_bad is not None and faulty.first_bad.stage == FAULTS[FAULT].stage

        task = progress.add_task("gradient of every loss term on 8 devices and on one", total=None)
        config = Config(**options)
        batch = next(read_packed_batches(tape.files, config.replace(symmetry_type="none"), config.seed))
        objective = audit.audit_objective(config, batch, init_state)
        progress.remove_task(task)
        console.print(f"4. the single-device audit: {objective.verdict()}", highlight=False)

        curves = {side.name: losses(side, progress) for side in (old, new)}
    same = curves[old.name] == curves[new.name]
    run_section = losses_section(curves)
    console.print(f"5. {run_section['title']}: {run_section['verdict']}", highlight=False)
    passed = check.passed and comparison.equal and caught and same
    verdict = (
        f"{'PASSED' if passed else 'FAILED'}: old and new stack {'agree in every bit' if comparison.equal else 'differ'}; "
        f"the naive port is {'caught at ' + FAULTS[FAULT].stage if caught else 'NOT caught where it was planted'}"
    )
    sections = [
        mesh_section(check),
        report.comparison_section(comparison, f"{STEPS} steps through both stacks", "Identical rows, options and start; every leaf of every stage."),
        report.comparison_section(faulty, "The naive port, caught", "pmean(grad(loss)) with parameters that were not cast to varying first."),
        audit_section(objective),
        run_section,
        report.limits_section(),
    ]
    facts = report.environment_facts() | run.tape_facts(tape)
    paths = report.write_report({"title": "kgo-shard demo", "environment": facts, "sections": sections, "verdict": verdict}, folder)
    console.print()
    console.print(f"{verdict}\n{time.perf_counter() - started:.0f} s; report: {', '.join(map(str, paths))}", highlight=False)
    return 0 if passed else 1


def losses(side: Side, progress: Progress) -> list[float]:
    """The loss of every step of a short run with the side's training step."""
    task = progress.add_task(f"{side.name}: {RUN_STEPS} steps", total=RUN_STEPS)
    state, curve = side.start(), []
    for chunk in side.chunks(lambda: state):
        state, metrics = side.step(state, chunk)
        curve.append(metrics["loss"])
        progress.advance(task)
        if len(curve) == RUN_STEPS:
            return curve
    raise ValueError(f"the run ends after {len(curve)} steps: raise max_training_samples")


def losses_section(curves: dict[str, list[float]]) -> dict:
    old, new = curves.values()
    return {
        "title": f"{RUN_STEPS} steps with each stack",
        "text": "The loss of every step; below, the difference.",
        "columns": ["stack", "first loss", "last loss"],
        "rows": [[name, f"{curve[0]:.4f}", f"{curve[-1]:.4f}"] for name, curve in curves.items()],
        "verdict": f"losses {'equal in every bit' if old == new else 'DIFFERENT'}",
        "image_png": report.plot_losses(curves),
    }


def mesh_section(check: mesh_check.MeshCheck) -> dict:
    text = "A linear model with two weights, whose gradient is known, on the devices of this run."
    columns = ["expectation", "expected", "got", "verdict"]
    rows = [list(row) for row in mesh_check.mesh_rows(check)]
    return {"title": "The mesh", "text": text, "columns": columns, "rows": rows, "verdict": check.verdict(), "image_png": None}


def audit_section(objective: audit.Audit) -> dict:
    """Each loss term: its share of the gradient, and how much it differs between D devices and one."""
    rows = [[term.term, f"{term.share:.3g}", f"{term.difference:.2e}"] for term in objective.terms]
    text = (
        "From cold moving statistics, each device's seki weight comes from its own rows, so the D-device gradient is not that of "
        "the whole batch. objective='global' makes it so."
    )
    columns = ["loss term", "norm / whole gradient", f"|{objective.devices} devices - 1| / whole gradient"]
    return {"title": "The single-device audit", "text": text, "columns": columns, "rows": rows, "verdict": objective.verdict(), "image_png": None}
