"""The `kgo-shard` command. Exit codes: 0 good, 1 something differs or failed, 2 it could not be tried (one line says why)."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import Progress

from . import nonfinite
from .batches import check_files, find_files, rows_read
from .checkpoint import load_any, save_checkpoint, try_folder, use_average
from .config import Config, ConfigError, Parser, add_options, from_arguments
from .diff.recording import exact_flags, is_exact
from .train import main as train_main

MOST_DEVICES = 512  # logical ones: thousands start for minutes and do nothing but wait for each other
SAMPLE = Path(__file__).parent.parent / "tests" / "data" / "selfplay9"
# What `diff` and `demo` run where no data folder is named: the shipped rows and a model that fits them.
SAMPLE_OPTIONS = {
    "pos_len": 9,
    "batch_size": 32,
    "model_kind": "b2c32",
    "compute_dtype": "float32",
    "max_training_samples": 1280,
    "warmup_samples": 256,
    "enable_history_matrices": True,
    "ema_decay": 0.99,
    "grad_clip_norm": 1.0,
}


def make_parser() -> Parser:
    parser = Parser(prog="kgo-shard", description=__doc__.split(" Exit")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train, with the original's command line", add_help=False)

    check = commands.add_parser("check-mesh", help="the smallest check of a mesh, before any training")
    check.add_argument("--devices", type=int, default=16, help="devices; logical ones on a CPU (default 16)")

    convert = commands.add_parser("convert", help="a checkpoint from the original's format into the own one, or back")
    convert.add_argument("source", type=Path, metavar="FROM", help="a run folder, one of its checkpoints, or a checkpoint_jax.pkl (which needs the training options)")
    convert.add_argument("target", type=Path, metavar="TO", help="NAME.pkl: the original's file; else a new run folder in the own format")
    convert.add_argument("--use", choices=("params", "ema"), default="params", help="ema: the moving average becomes the parameters")
    add_options(convert)

    diff = commands.add_parser("diff", help="run the old and the new stack side by side and compare every leaf of every stage")
    add_tape_options(diff)
    diff.add_argument("--exact", action="store_true", help="restart in exact mode, where equal bits are demanded")
    diff.add_argument("--states-only", action="store_true", help="state and metrics after each call, not the stages inside: half the time")
    diff.add_argument("--all-leaves", action="store_true", help="a row for every leaf, not only the worst of each stage")
    diff.add_argument("--fault", help="plant this fault in the new side (a wrong name lists them)")
    diff.add_argument("--legacy-python", metavar="PYTHON", help="run the old stack under this interpreter too, with its own JAX (0.4.35, 0.7.2)")
    diff.add_argument("--report", type=Path, metavar="DIR", help="write report.json and report.html there")

    record = commands.add_parser("record", help="run one side and keep its tape and trace in a folder")
    record.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    add_tape_options(record)
    add_player_options(record)

    replay = commands.add_parser("replay", help="run a recorded tape again, on either side, and compare with what was recorded")
    replay.add_argument("folder", type=Path, metavar="DIR", help="what `record` wrote, a step that stopped a run (TRAINDIR/nonfinite/...), or a recording of the original (case.json)")
    replay.add_argument("--datadir", type=Path, metavar="DATA", help="where the tape's train and val files are now (default: where they were)")
    replay.add_argument("--all-leaves", action="store_true", help="a row for every leaf, not only the worst of each stage")
    replay.add_argument("--report", type=Path, metavar="DIR", help="write report.json and report.html there")
    add_player_options(replay)

    faults = commands.add_parser("faults", help="plant every known fault in the new side: is it found, and where?")
    faults.add_argument("--only", nargs="+", metavar="FAULT", default=None, help="some of them (a wrong name lists all)")
    faults.add_argument("--shard-state", choices=("none", "data"), default="none", help="of the new side: whole on every device, or split")
    faults.add_argument("--json", type=Path, metavar="FILE", help="write the findings there")
    faults.add_argument("--report", type=Path, metavar="DIR", help="write report.json and report.html there")

    certificate = commands.add_parser("certificate", help="all of it on one tape: one page and one JSON file")
    add_tape_options(certificate)
    certificate.add_argument("--faults", nargs="+", metavar="FAULT", help="plant these only (default: all, which takes most of the time)")
    certificate.add_argument("--report", type=Path, metavar="DIR", default=Path("reports/certificate"), help="default reports/certificate")

    noise = commands.add_parser("noise", help="the noise floor: the old stack against itself where only rounding is changed")
    add_tape_options(noise)

    collectives = commands.add_parser("collectives", help="every collective of both stacks' steps: kind, count, dtype, bytes")
    add_tape_options(collectives, runs=False)

    ledger = commands.add_parser("ledger", help="every piece of state of a run: owner, dtype, placement, saved or not, compared or not")
    add_options(ledger)

    plot = commands.add_parser("plot", help="draw runs: losses, accuracy, learning rate, gradient norm and throughput over the training samples")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, or a file that a trainer's output went to")
    plot.add_argument("--out", type=Path, metavar="FILE.png", help="default: plot.png in the only run's folder, else here")

    make_data = commands.add_parser("make-data", help="synthetic rows for trials, of any number and board size")
    make_data.add_argument("folder", type=Path, metavar="DIR", help="a new folder; gets train/ and val/")
    make_data.add_argument("--rows", type=int, default=4096, metavar="N", help="training rows (default 4096)")
    make_data.add_argument("--files", type=int, metavar="N", help="files of training rows (default: of at most 8192 rows each)")
    make_data.add_argument("--val-rows", type=int, default=512, metavar="N", help="validation rows (default 512)")
    make_data.add_argument("--pos-len", type=int, default=19, metavar="P", help="board edge (default 19, as the trainer's)")
    make_data.add_argument("--seed", type=int, default=1234, metavar="S", help="equal seeds give equal rows (default 1234)")

    demo = commands.add_parser("demo", help="the whole story on the shipped real rows, in a few minutes")
    demo.add_argument("--report", type=Path, metavar="DIR", default=Path("reports/demo"), help="where the report goes (default reports/demo)")
    return parser


def add_player_options(parser: Parser):
    parser.add_argument("--side", choices=("old", "new"), default="old", help="legacy_pmap or kgo_shard (default old)")
    parser.add_argument("--exact", action="store_true", help="restart in exact mode: two such runs on one JAX must agree in every bit")
    parser.add_argument("--python", metavar="PYTHON", help="run the old side under this interpreter, with its own JAX")


def add_tape_options(parser: Parser, runs: bool = True):
    """The flags that `make_tape` reads; where nothing runs there is one step, from a fresh start."""
    parser.add_argument("--devices", type=int, default=8, help="devices; logical ones on a CPU (default 8)")
    if runs:
        parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare (default 5)")
        parser.add_argument("--checkpoint", type=Path, help="checkpoint_jax.pkl to start both sides from (default: a fresh start)")
    else:
        parser.set_defaults(steps=1, checkpoint=None)
    add_options(parser, leave_out=("data_parallel", "data_parallel_devices"))


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train"]:
        return train_main(argv[1:])
    arguments = make_parser().parse_args(argv)
    command = {
        "check-mesh": run_check_mesh,
        "convert": run_convert,
        "diff": run_diff,
        "record": run_record,
        "replay": run_replay,
        "faults": run_faults,
        "certificate": run_certificate,
        "noise": run_noise,
        "collectives": run_collectives,
        "ledger": run_ledger,
        "plot": run_plot,
        "make-data": run_make_data,
        "demo": run_demo,
    }[arguments.command]
    try:
        try_outputs(arguments)
        return command(arguments, argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:  # what the package and the old stack raise for what they are given
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        return 2


def try_outputs(arguments):
    """ConfigError where the report could not be written: before minutes are spent on it."""
    for name in ("report", "json"):
        path = getattr(arguments, name, None)
        if path is None:
            continue
        folder = path if name == "report" else path.parent
        try:
            try_folder(folder)
        except OSError as error:
            raise ConfigError(f"--{name} {path}: cannot be written ({error.strerror}): name another place") from None
        if name == "json" and path.is_dir():
            raise ConfigError(f"--json {path}: is a folder: name a file in it")


def start_devices(count: int):
    """Have `count` devices: logical ones where this machine has only CPUs. ConfigError where they cannot be had."""
    if not 1 <= count <= MOST_DEVICES:
        raise ConfigError(f"--devices {count}: must be from 1 to {MOST_DEVICES}")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX runs already (in a test, say): what it has is what there is
    if jax.local_device_count() < count:
        raise ConfigError(f"--devices {count}: this process has {jax.local_device_count()}; ask for fewer")


def make_console() -> Console:
    """Wide where nobody looks: a table in a file or a pipe is not folded to 80 columns."""
    return Console(width=None if sys.stdout.isatty() else 200)


def restart_exact(argv: Sequence[str]):
    """Start this command again with the compiler flags of exact mode, which JAX reads only once. Does not return."""
    ours = exact_flags()
    names = {flag.split("=")[0] for flag in ours}
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] not in names]
    environment = os.environ | {"XLA_FLAGS": " ".join((*others, *ours))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "kgo_shard", *argv], environment)


def run_check_mesh(arguments, argv) -> int:
    from .diff.mesh_check import check_mesh, mesh_table

    start_devices(arguments.devices)
    check = check_mesh(arguments.devices)
    console = make_console()
    console.print(mesh_table(check))
    console.print(check.verdict())
    return check.exit_code


def run_convert(arguments, argv) -> int:
    from .keeper import keep_converted

    if arguments.target.exists():
        raise ConfigError(f"{arguments.target}: is there already: name another place")
    given = {name: value for name, value in vars(arguments).items() if name in Config.__dataclass_fields__}
    state, config = load_any(arguments.source, Config(**given) if given else None)
    if arguments.use == "ema":
        state = use_average(state)
    if arguments.target.suffix == ".pkl":
        save_checkpoint(arguments.target, state, config)
    else:
        keep_converted(arguments.target, state, config)
    print(f"{arguments.target}: step {state.step}, {state.samples} samples, {'moving average' if arguments.use == 'ema' else 'parameters'}")
    return 0


def run_diff(arguments, argv) -> int:
    if arguments.exact and not is_exact():
        restart_exact(argv)
    from .diff import fault_matrix, report, run
    from .diff.faults import FAULTS

    start_devices(arguments.devices)
    tape = make_tape(arguments)
    console = make_console()
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        if arguments.fault in FAULTS:
            tape = fault_matrix.fit(tape, FAULTS[arguments.fault], Path(folder))
        facts = report.environment_facts() | run.tape_facts(tape)
        print_facts(facts, console)
        if arguments.legacy_python:
            return show_drifts(run.diff_across(tape, is_exact(), arguments.legacy_python, progress), facts, arguments, console)
        comparison = run.diff(tape, exact=is_exact(), fault=arguments.fault, progress=progress, states_only=arguments.states_only)
    return show_comparison("kgo-shard diff", "Old against new, stage by stage", comparison, facts, arguments, console)


def print_facts(facts: dict[str, str], console: Console):
    for name, value in facts.items():
        console.print(f"{name:>12}  {value}", highlight=False, markup=False)


def show_comparison(title: str, heading: str, comparison, facts: dict[str, str], arguments, console: Console) -> int:
    """The table, and with --report the files; the exit code."""
    from .diff import report

    console.print(report.comparison_table(comparison, all_leaves=arguments.all_leaves))
    if arguments.report:
        sections = [report.comparison_section(comparison, heading, all_leaves=True), report.limits_section()]
        paths = report.write_report(
            {"title": title, "environment": facts, "sections": sections, "verdict": comparison.verdict()}, arguments.report
        )
        console.print(f"report: {', '.join(map(str, paths))}", highlight=False)
    return comparison.exit_code


def run_record(arguments, argv) -> int:
    if arguments.exact and not is_exact():
        restart_exact(argv)
    from .diff import replay

    start_devices(arguments.devices)
    console = make_console()
    with Progress(console=console, transient=True) as progress:
        facts = replay.record(arguments.folder, make_tape(arguments), make_player(arguments, progress))
    console.print(f"{arguments.folder}: {arguments.steps} steps, {replay.describe(facts)}", highlight=False, markup=False)
    return 0


def run_replay(arguments, argv) -> int:
    if arguments.exact and not is_exact():
        restart_exact(argv)
    from .diff import replay, report, run

    tape = replay.read_tape(arguments.folder, arguments.datadir)
    start_devices(tape.options.get("data_parallel_devices") or 1)
    console = make_console()
    with Progress(console=console, transient=True) as progress:
        if (arguments.folder / nonfinite.FACTS).exists():
            return show_nonfinite(replay.replay_nonfinite(arguments.folder, tape, make_player(arguments, progress)), tape, arguments, console)
        found = replay.replay(arguments.folder, tape, make_player(arguments, progress))
    facts = report.environment_facts() | run.tape_facts(tape)
    facts |= {"recorded": replay.describe(found.recorded), "replayed": replay.describe(found.replayed)}
    facts["demanded"] = "equal bits" if found.bits else "the three-way bound"
    print_facts(facts, console)
    return show_comparison("kgo-shard replay", "Recorded against replayed, stage by stage", found.comparison, facts, arguments, console)


def show_nonfinite(found, tape, arguments, console: Console) -> int:
    """What of the step is not finite, and whether it is what the run was stopped for."""
    from .diff import report, run

    facts = report.environment_facts() | run.tape_facts(tape)
    facts |= {"step": str(found.facts.get("step")), "rows": f"{found.facts.get('rows')} of {found.facts.get('file')}"}
    print_facts(facts, console)
    section = report.nonfinite_section(found)
    console.print(report.section_table(section))
    if arguments.report:
        content = {"title": "kgo-shard replay", "environment": facts, "sections": [section], "verdict": section["verdict"]}
        console.print(f"report: {', '.join(map(str, report.write_report(content, arguments.report)))}", highlight=False)
    return 0 if found.reproduced else 1


def make_player(arguments, progress: Progress):
    from .diff.replay import Player

    return Player(arguments.side, arguments.python, is_exact(), progress)


def show_drifts(drifts, facts: dict[str, str], arguments, console: Console) -> int:
    """Migration and upgrade, each a table and a verdict."""
    from .diff import report

    parts = {
        f"Migration: old against new, JAX {jax.__version__}": drifts.migration,
        f"Upgrade: the old stack, JAX {drifts.there} against {jax.__version__}": drifts.upgrade,
        f"Both: old on JAX {drifts.there} against new on {jax.__version__}": drifts.both,
    }
    for title, comparison in parts.items():
        console.print(title, style="bold", highlight=False)
        console.print(report.comparison_table(comparison, all_leaves=arguments.all_leaves))
    verdicts = [f"{title}: {comparison.verdict()}" for title, comparison in parts.items()]
    for verdict in verdicts:
        console.print(verdict, highlight=False, soft_wrap=True)
    if arguments.report:
        sections = [report.comparison_section(comparison, title, all_leaves=True) for title, comparison in parts.items()]
        sections.append(report.limits_section())
        content = {"title": "kgo-shard diff, two JAX versions", "environment": facts, "sections": sections, "verdict": "; ".join(verdicts)}
        console.print(f"report: {', '.join(map(str, report.write_report(content, arguments.report)))}", highlight=False)
    return drifts.exit_code


def make_tape(arguments):
    """The tape of parsed `diff` arguments; the shipped rows where no data folder is named."""
    from .diff.trace import Tape

    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: must be at least 1")
    given = {name: value for name, value in vars(arguments).items() if name in Config.__dataclass_fields__}
    datadir = given.pop("datadir", None)
    defaults = SAMPLE_OPTIONS if datadir is None else {}
    options = defaults | {"log_grad_norm": True} | given
    options |= {"data_parallel": arguments.devices > 1, "data_parallel_devices": arguments.devices if arguments.devices > 1 else 0}
    config = Config(**options)
    folder = Path(datadir or SAMPLE) / "train"
    files = check_files(folder, config, rows_read(config))
    validation = folder.parent / "val"
    return Tape(options, files, arguments.steps, arguments.checkpoint, find_files(validation) if validation.is_dir() else ())


def run_faults(arguments, argv) -> int:
    if not is_exact():
        restart_exact(argv)
    from .diff import fault_matrix, report
    from .diff.faults import FAULTS, choose

    names = choose(arguments.only, "--only", arguments.shard_state)
    start_devices(fault_matrix.DEVICES)
    console, findings = make_console(), []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("faults", total=len(names))
        for found in fault_matrix.run_faults(names, *fault_input(arguments.shard_state), progress):
            findings.append(found)
            progress.advance(task)
            console.print(f"{'named' if found.named else 'MISSED':7} {found.name:32} {found.comparison.verdict()}", highlight=False, soft_wrap=True)
            if arguments.json:
                fault_matrix.write_json(arguments.json, findings, arguments.shard_state)
    section = fault_matrix.faults_section(findings)
    if len(names) < len(FAULTS) and arguments.only is None:
        left_out = ", ".join(name for name in FAULTS if name not in names)
        console.print(f"NOT RUN: {left_out}: with a split state they cannot be made", highlight=False)
    console.print(report.section_table(section))
    console.print(section["verdict"], highlight=False)
    if arguments.report:
        content = {"title": "kgo-shard faults", "environment": report.environment_facts(), "sections": [section], "verdict": section["verdict"]}
        console.print(f"report: {', '.join(map(str, report.write_report(content, arguments.report)))}", highlight=False)
    return 0 if all(found.named for found in findings) else 1


def run_collectives(arguments, argv) -> int:
    from .diff import collectives, report

    start_devices(arguments.devices)
    tape, console = make_tape(arguments), make_console()
    if Config(**tape.options).splits_state:
        from .diff import split_audit

        found = split_audit.audit_split(tape)
        console.print(report.section_table(split_audit.section(found)))
        return 0 if found.explained else 1
    audits = collectives.audit(tape)
    for section in collectives.sections(audits):
        console.print(report.section_table(section))
    return 0 if all(found.equal for found in audits.values()) else 1


def fault_input(shard_state: str = "none") -> tuple[dict, list[Path], list[Path]]:
    """Options, training and validation files on which every fault shows: the shipped rows, on 8 devices."""
    from .diff.fault_matrix import DEVICES

    devices = {"data_parallel": True, "data_parallel_devices": DEVICES}
    # Epochs that start at step 5 draw from seed 7: their first batch has points that nobody owns.
    options = SAMPLE_OPTIONS | {"log_grad_norm": True, "seed": 2, "shard_state": shard_state} | devices
    return options, find_files(SAMPLE / "train"), find_files(SAMPLE / "val")


def run_certificate(arguments, argv) -> int:
    if not is_exact():
        restart_exact(argv)
    from .diff import certificate, fault_matrix
    from .diff.faults import choose

    shard_state = getattr(arguments, "shard_state", "none")
    faults = choose(arguments.faults, "--faults", shard_state)
    start_devices(max(arguments.devices, fault_matrix.DEVICES))
    return certificate.certify(arguments.report, make_tape(arguments), faults, fault_input(shard_state), make_console())


def run_noise(arguments, argv) -> int:
    from .diff import compare, noise, report, run, shard_side

    start_devices(arguments.devices)
    tape, console = make_tape(arguments), make_console()
    with Progress(console=console, transient=True) as progress:
        sides = run.old_stack().make_side(tape, probe_only=True), shard_side.make_side(tape, probe_only=True)
        old, new = (run.record_shown(side, tape, progress) for side in sides)
        floor = noise.measure(tape, sides[0], old, progress)
    console.print(report.section_table(noise.noise_section(floor, compare.compare(old, new))))
    return 0


def run_ledger(arguments, argv) -> int:
    from .diff import ledger, report

    make_console().print(report.section_table(ledger.ledger_section(from_arguments(arguments))))
    return 0


def run_plot(arguments, argv) -> int:
    from .plot import plot

    print(plot(arguments.runs, arguments.out))
    return 0


def run_make_data(arguments, argv) -> int:
    from .make_data import make_data

    options = {name: getattr(arguments, name) for name in ("rows", "files", "val_rows", "pos_len", "seed")}
    with Progress(console=make_console(), transient=True) as progress:
        paths = make_data(arguments.folder, progress=progress, **options)
    size = sum(path.stat().st_size for path in paths)
    print(f"{arguments.folder}: {arguments.rows} training and {arguments.val_rows} validation rows, {len(paths)} files, {size / 1e6:.1f} MB")
    return 0


def run_demo(arguments, argv) -> int:
    if not is_exact():
        restart_exact(argv)
    from .diff import demo

    start_devices(demo.DEVICES)
    return demo.run_demo(arguments.report, SAMPLE, SAMPLE_OPTIONS, make_console())


if __name__ == "__main__":
    sys.exit(main())
