"""The certificate: everything that the harness can say of a migration on one tape, as one page and one JSON file."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from ..batches import read_packed_batches
from ..config import Config
from ..state import init_state
from . import audit, collectives, compare, demo, fault_matrix, ledger, noise, report, run, shard_side, split_audit
from .trace import Tape


def certify(folder: Path, tape: Tape, faults: Sequence[str], fault_input: tuple, console: Console) -> int:
    """Run all parts in exact mode, show them as they come, write the report. 0 if everything is as it should be, else 1.

    The faults are planted on a tape of their own, (options, training files, validation files), on which each one shows.
    """
    legacy_side, started = run.old_stack(), time.perf_counter()
    config, sections, failed = Config(**tape.options), [], []

    def add(section: dict, good: bool):
        """One finished part."""
        sections.append(section)
        failed.extend([] if good else [section["title"]])
        console.print(f"{len(sections):2}. {section['title']}: {section['verdict'] or 'listed'}", highlight=False)

    with Progress(console=console, transient=True) as progress:
        old, new = legacy_side.make_side(tape), shard_side.make_side(tape)
        traces = [run.record_shown(side, tape, progress) for side in (old, new)]
        parity = compare.compare(*traces)
        add(report.comparison_section(parity, f"{tape.steps} steps, old against new", "Exact mode: every leaf of every stage, equal bits."), parity.equal)

        bounded = run.measure_bound(tape, old, progress).judge(*traces)
        section = report.comparison_section(bounded, "Both against float64", "How far each side's rounding carries it, and the limit.")
        add(section | {"image_png": report.plot_errors(bounded)}, bounded.equal)

        curves = {side.name: demo.losses(side, progress) for side in (old, new)}
        add(demo.losses_section(curves), curves[old.name] == curves[new.name])

        probed = legacy_side.make_side(tape, probe_only=True)
        floor = noise.measure(tape, probed, run.record_shown(probed, tape, progress), progress)
        add(noise.noise_section(floor, parity), True)
        add(ledger.ledger_section(config), True)
        if config.splits_state:
            split = split_audit.audit_split(tape)
            add(split_audit.section(split), split.explained)
        else:
            counted = collectives.audit(tape)
            for section, form in zip(collectives.sections(counted), counted.values(), strict=True):
                add(section, form.equal)

        task = progress.add_task("gradient of every loss term on one device and on all", total=None)
        batch = next(read_packed_batches(tape.files, config.replace(symmetry_type="none"), config.seed))
        found = audit.objective_ledger(config.replace(shard_state="none"), batch, init_state)  # the loss is the same, however its state lies
        progress.remove_task(task)
        add(audit.ledger_section(found), all(found.differs(name) == [] for name in found.audits if name.startswith("global")))

        task, findings = progress.add_task("planted faults", total=len(faults)), []
        for finding in fault_matrix.run_faults(faults, *fault_input, progress):
            findings.append(finding)
            progress.advance(task)
        add(fault_matrix.faults_section(findings), all(finding.named for finding in findings))
    sections.append(report.limits_section())
    verdict = "PASSED: every part is as it should be" if not failed else f"FAILED: {', '.join(failed)}"
    facts = report.environment_facts() | run.tape_facts(tape)
    content = {"title": "Certificate of migration", "environment": facts, "sections": sections, "verdict": verdict}
    paths = report.write_report(content, folder)
    console.print(f"\n{verdict}\n{time.perf_counter() - started:.0f} s; certificate: {', '.join(map(str, paths))}", highlight=False)
    return 1 if failed else 0
