"""The original's recordings (shared/traces) replayed on this JAX with both stacks, and judged.

    python -m tests.parity.recordings [--json tests/parity/results/recordings_jax_X.json] [--cases adamw_f32 adamw_f32/exact ...]
        [--stacks legacy_pmap kgo_shard] [--traces DIR] [--dumps DIR [--judge-only]]

For each case up to four replays by `tests/parity/legacy/replay_recording.py`, each a process with exactly the case's D devices:
legacy_pmap, kgo_shard, legacy_pmap in float64, and legacy_pmap from parameters one unit in the last place off. What the original
recorded under JAX 0.4.35 is the old side A, a replay is the new side B, the float64 run the reference, the last one the noise, and `kgo_shard/diff/limits.py` has the only limits: nothing is chosen here. legacy_pmap's
rows show what upgrading JAX does, kgo_shard's what upgrading and migrating do together. Judged are:

- batch stream, counts, start states, the checkpoint's meta: equal bits;
- head outputs, metrics, moving sum, gradients on one and on D devices, every kept checkpoint's leaves: the three-way bound;
- the log's figures (all but time, sps, TFLOPS, MFU): equal text; where a printed digit differs, the value behind it by the bound;
- on the recordings' own JAX (0.4.35, where only legacy_pmap runs) besides: every bit of every item, in both modes. On a processor
  whose matrix kernels are the recordings' the replay must have them as it is. On another one with AVX-512, as the recording
  machine's, it must have them once the one product that is known to differ is summed as on that machine, and the run as it is must
  keep the bound; NOT THE RECORDINGS' KERNELS is printed. Without AVX-512 only the bound is asserted, and that is printed too.

Exit code 0: all kept; 1: a limit is broken; 2: nothing could be judged. With --dumps the replays are kept, and --judge-only judges
those that are there.
"""

import argparse
import concurrent.futures
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.parity.legacy.replay_recording import METRICS, read_case, read_recorded_state, without_timings

ROOT = Path(__file__).parents[2]
if importlib.util.find_spec("equinox") is None:
    # JAX 0.4.35: kgo_shard cannot be imported there, but its harness needs only NumPy. A bare package finds kgo_shard/diff.
    sys.modules["kgo_shard"] = types.ModuleType("kgo_shard")
    sys.modules["kgo_shard"].__path__ = [str(ROOT / "kgo_shard")]

from kgo_shard.diff.compare import LeafResult, compare  # noqa: E402
from kgo_shard.diff.limits import LIMITS, coarser  # noqa: E402
from kgo_shard.diff.recording import WITHOUT_YNNPACK  # noqa: E402
from kgo_shard.diff.trace import state_stages  # noqa: E402

TRACES = ROOT.parent / "shared" / "traces"
NAMES = (
    "adamw_f32", "single_device_f32", "adamw_bf16compute", "muon_all_f32", "muon_attn_allbf16", "fused_scan_sgd_f32", "stacked_muon_ffn_d16"
)  # fmt: skip
CASES = tuple(name + mode for name in NAMES for mode in ("", "/exact"))
STACKS = ("legacy_pmap", "kgo_shard")
REFERENCE = "float64"
NOISE = "perturbed"
RECORDED_JAX = "0.4.35"
COLUMNS = ("case", "stack", "stage group", "items", "equal", "x of limit", "worst item", "verdict")

# What is special about comparing with recordings; the limits themselves are in kgo_shard/diff/limits.py.
REASONS = (
    ("old side", "what the original recorded under JAX 0.4.35, not a replay of it"),
    ("reference", "legacy_pmap with every float in float64, from the same recorded starts and rows, on the JAX under test"),
    ("noise", "legacy_pmap on the JAX under test, from the recorded starts with every parameter one unit in the last place off"),
    ("head outputs", "judged as a stage of their own, each head a leaf, by the rule of all stages but parameters and EMA"),
    ("moving weight", "by the bound, as the moving sum: the mean of D equal numbers is rounded in the order in which they are added"),
    (
        "figures of the log",
        "equal text, else the three-way bound with the printed number as the old side's value: more of it was not recorded, so its "
        "last printed digit is a part of its error. The new side's value is the one behind its text, which must round to that text",
    ),
    ("meta of the checkpoint", "equal text, all keys but moving_sum, which is judged with the kept checkpoints"),
    ("moving statistics of kgo_shard's values.npz", "from its probe's step: its gradient function does not return them"),
    ("bits on 0.4.35", "asserted on x86-64 with AVX-512, as recorded; of the kernels there, one product is known to differ"),
    (
        "bfloat16 products on JAX 0.12",
        "JAX 0.12.0 (XLA for CPUs) sums a bfloat16 product that YNNPACK does not take in bfloat16: the weight gradient of 2592 rows of "
        "ones is 768 there, and every weight's gradient is 2e-2 off (4e-3 when recorded). That breaks the bound in both stacks alike, "
        "as --as-is shows. With YNNPACK's fusions off the sums are float32's again, and so the bfloat16 case is replayed where that "
        "sum of ones is not 2592. --xla_allow_excess_precision and the exact mode's flags make no difference",
    ),
)
ONES = 2592  # rows of the sum, as many as the recordings' batches have points; bfloat16 holds no odd number above 256

Arrays = dict[str, np.ndarray]


class RecordingsError(Exception):
    """There is nothing to judge: a replay or a recording is missing or broken."""


# From files to named arrays: a recording under the names that a replay dumps


def read_recording(folder: Path) -> tuple[Arrays, list[str], dict[str, str]]:
    """Arrays, log lines and meta of one recorded case."""
    states = {path.stem: read_recorded_state(path) for path in sorted(folder.glob("step_*.pkl"))}
    if len(states) < 2:
        raise RecordingsError(f"{folder}: not a recording: it needs step_0000.pkl and a later step")
    arrays = {f"{step}/{name}": array for step, (state, _) in states.items() for name, array in state.items()}
    first = sorted(states)[1]
    arrays |= {f"start/{name}": array for name, array in states[first][0].items()}
    for file, prefix in (("values.npz", "values/"), ("batches.npz", "batches/")):
        if (folder / file).exists():
            with np.load(folder / file) as content:
                arrays |= {prefix + name: content[name] for name in content}
    for name in arrays:
        place, _, leaf = name.removeprefix("values/").partition("/")
        if place in ("grad_1", "grad_D"):  # a gradient has its parameter's dtype; NumPy's files have no bfloat16
            arrays[name] = arrays[name].astype(arrays[f"start/params/{leaf}"].dtype)
    log = folder / "train.log"
    lines = [without_timings(line) for line in log.read_text().splitlines()] if log.exists() else []
    for line in lines:
        prefix, texts = parse_line(line)
        arrays |= {f"figures/{prefix}/{name}": np.float32(text) for name, text in texts.items() if is_figure(name)}
    meta = {name: repr(value) for name, value in states[sorted(states)[-1]][1].items()} if lines else {}
    return arrays, lines, meta


def parse_line(line: str) -> tuple[str, dict[str, str]]:
    """A log line as its first words ("step=1" or "VAL") and its figures as printed."""
    parts = dict(part.strip().rsplit("=", 1) for part in line.split(":", 1)[-1].split(","))
    return ("VAL" if "VAL" in line else f"step={parts['step']}"), parts


def is_figure(name: str) -> bool:
    return name not in ("step", "samples", "wd")


def read_replay(dumps: Path, case: str, side: str) -> tuple[Arrays, dict]:
    stem = dump_stem(dumps, case, side)
    try:
        facts = json.loads(Path(f"{stem}.json").read_text())
        with np.load(f"{stem}.npz") as content:
            arrays = {name: content[name] for name in content}
        arrays |= {name: arrays[name].view(ml_dtypes.bfloat16) for name in facts["bfloat16"]}
    except (OSError, ValueError, KeyError) as error:
        raise RecordingsError(f"{case}: no replay of {side}: {error}") from None
    if side == REFERENCE:
        wrong = [name for name, x in arrays.items() if x.dtype not in (np.float64, np.int64) and not name.startswith("batches/")]
        if wrong or facts["compute"] != "float64":
            raise RecordingsError(f"{case}: the reference is not in float64: {', '.join(wrong[:3])}")
    return arrays, facts


def dump_stem(dumps: Path, case: str, side: str) -> Path:
    return dumps / f"{case.replace('/', '-')}.{side}"


# From named arrays to traces


def to_traces(arrays: Arrays) -> dict[str, list[Arrays]]:
    """One trace for each comparison, as compare.py takes them: the start state first."""

    def below(prefix):
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    def metrics(vector):
        return {f"metrics/{name}": np.asarray(value) for name, value in zip(METRICS, vector, strict=True)}

    def moving(name):
        total, weight = np.split(found[name], 2)
        return {"moving_statistics/sum": total, "moving_statistics/weight": weight}

    def values(*parts):
        return [start, {name: array for part in parts for name, array in part.items()}]

    start = inexact(state_stages(below("start/")))
    steps = sorted({name.partition("/")[0] for name in arrays if name.startswith("step_")})
    traces = {"run": [inexact(state_stages(below(f"{step}/"))) for step in steps]}
    found = below("values/")
    traces["head outputs"] = values({f"loss_terms/{name}": array for name, array in below("values/out/").items()})
    traces["one device"] = values(
        {f"reduced_gradient/{name}": array for name, array in below("values/grad_1/").items()},
        metrics(found["metrics_train_1"]),
        moving("moving_1"),
    )
    traces["evaluation"] = values(metrics(found["metrics_eval_1"]))
    if "metrics_train_D" in found:
        traces["D devices"] = values(
            {f"loss_terms/{name}": np.ascontiguousarray(column) for name, column in zip(METRICS, found["metrics_local_D"].T, strict=True)},
            {f"reduced_gradient/{name}": array for name, array in below("values/grad_D/").items()},
            metrics(found["metrics_train_D"]),
            moving("moving_D"),
        )
    if figures := below("figures/"):
        lines = dict.fromkeys(name.partition("/")[0] for name in figures)  # as printed
        stage = {"lr": "learning_rate"}
        traces["log"] = [start] + [
            {stage.get(name, f"metrics/{name}"): np.asarray(x) for name, x in below(f"figures/{line}/").items()} for line in lines
        ]
    exact = {f"batch/{name}": array for name, array in below("batches/").items()}
    for step in steps:
        names = ("step", "samples")
        exact |= {f"counts/{step}/{name}": arrays[f"{step}/{name}"] for name in names if f"{step}/{name}" in arrays}
    traces["exact"] = [exact]
    return traces


def inexact(stages: Arrays) -> Arrays:
    """Without what the comparison "exact" looks at."""
    return {name: x for name, x in stages.items() if not name.startswith("counts/")}


# The verdict


def judge(
    recorded: tuple[Arrays, list[str], dict[str, str]], replayed: tuple[Arrays, dict], reference: Arrays, noise: Arrays, coarsest: np.dtype
) -> list[dict]:
    """One row for each group of one case and stack."""
    arrays, lines, meta = recorded
    new_arrays, facts = replayed
    old, new, exact, noisy = (to_traces(x) for x in (arrays, new_arrays, reference, noise))
    if not lines:
        new.pop("log", None)  # a replay has the figures of every run; exact/ folders have no log
    kept = sorted({int(name[5:9]) for name in arrays if name.startswith("step_")})
    rows, starts = [], []
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new or name not in exact:
            rows.append(failed_row(name, f"missing: {name} is not in the recording, the replay and the reference alike"))
            continue
        digits = coarser(coarsest, np.dtype(ml_dtypes.bfloat16)) if name == "log" else coarsest  # three digits of the rate are printed
        bound = () if name == "exact" else (exact[name], [noisy[name]], digits)
        leaves = compare(old[name], new[name], *bound, numbers=kept if name == "run" else None).leaves
        if name == "log":
            texts = [item.get("text") for item in facts["items"] if item["name"].startswith("log/")]
            rows.append(log_row(lines, texts, leaves, old[name], new_arrays))
            continue
        starts += [leaf for leaf in leaves if leaf.step == 0 and name != "exact"]
        leaves = [leaf for leaf in leaves if leaf.step > 0 or name == "exact"]
        for stage in dict.fromkeys(leaf.stage for leaf in leaves):
            rows.append(leaves_row(label(name, stage), [leaf for leaf in leaves if leaf.stage == stage]))
    rows.append(leaves_row("start states as loaded", starts))
    if meta:
        rows.append(meta_row(meta, facts["items"]))
    if facts["kernels"] is not None:
        rows.append(bits_row(facts))
    return rows


def label(comparison: str, stage: str) -> str:
    if comparison == "exact":
        return {"batch": "batch stream", "counts": "counts"}[stage]
    words = stage.replace("_", " ").replace("reduced gradient", "gradient")
    if comparison == "head outputs":
        return comparison
    return f"kept checkpoints: {words}" if comparison == "run" else f"{comparison}: {words}"


def row(group: str, items: int, equal: int, verdict: str, passed: bool, worst: LeafResult | None = None, notes: Iterable[str] = ()) -> dict:
    x = None if worst is None else worst.x_of_limit
    return {
        "group": group,
        "items": items,
        "equal": equal,
        "x_of_limit": None if x is None else str(x) if np.isinf(x) else round(x, 4),
        "worst": "" if x is None else f"step {worst.step}, {worst.name}",
        "verdict": verdict,
        "passed": passed,
        "notes": list(notes),
    }


def failed_row(group: str, reason: str) -> dict:
    return row(group, 0, 0, f"DIFFERENT: {reason}", False)


def leaves_row(group: str, leaves: list[LeafResult]) -> dict:
    if not leaves:
        return failed_row(group, "nothing was compared")
    bad = [leaf for leaf in leaves if not leaf.passed]
    equal = sum(leaf.equal_bits for leaf in leaves)
    verdict = "equal" if equal == len(leaves) else "within limits"
    if bad:
        verdict = f"DIFFERENT: {len(bad)} items, first at step {bad[0].step}, {bad[0].name}: {bad[0].reason}"
    judged = [leaf for leaf in leaves if leaf.x_of_limit is not None]
    worst = max(judged, key=lambda leaf: leaf.x_of_limit, default=None)
    notes = [f"step {leaf.step}, {leaf.name}: {leaf.reason}, errors {leaf.error_a} (recorded) and {leaf.error_b}" for leaf in bad[:20]]
    return row(group, len(leaves), equal, verdict, not bad, worst, notes)


def log_row(lines: list[str], texts: list[str], leaves: Iterable[LeafResult], trace: list[Arrays], arrays: Arrays) -> dict:
    """The printed figures: equal text, or the value behind it within its limit."""
    if len(lines) != len(texts) or None in texts:
        return failed_row("log", f"{len(texts)} lines printed, {len(lines)} recorded")
    by_name = {(leaf.step, leaf.leaf or "lr"): leaf for leaf in leaves}
    items, equal, bad, apart = 0, 0, [], []
    for index, (line, text) in enumerate(zip(lines, texts, strict=True), start=1):
        (prefix, recorded), (_, printed) = parse_line(line), parse_line(text)
        items += len(recorded)
        if recorded.keys() != printed.keys():
            bad.append(f"{prefix}: other figures: {text}")
            continue
        for name, figure in recorded.items():
            value = arrays.get(f"figures/{prefix}/{name}")
            if is_figure(name) and (value is None or as_printed(value, printed[name]) != printed[name]):
                bad.append(f"{prefix} {name}: printed {printed[name]}, but its value is {value}")
            elif printed[name] == figure:
                equal += 1
            elif not is_figure(name) or not by_name[index, name].passed:
                reason = by_name[index, name].reason if is_figure(name) else "not a figure that may differ"
                bad.append(f"{prefix} {name}: recorded {figure}, replayed {float(value) if value is not None else printed[name]!r}: {reason}")
            else:
                apart.append(by_name[index, name])
    notes = bad + [
        f"{lines[leaf.step - 1].split(',')[0].strip()} {leaf.leaf}: the text differs, the value behind it is {leaf.x_of_limit:.2g} x of limit"
        for leaf in apart
    ]
    verdict = f"DIFFERENT: {len(bad)} figures, first {bad[0]}" if bad else "equal text" if equal == items else "within limits"
    worst = max(apart, key=lambda leaf: leaf.x_of_limit, default=None)
    return row("log", items, equal, verdict, not bad, worst, notes)


def as_printed(value: np.ndarray, text: str) -> str:
    """`value` with as many digits as `text` has."""
    digits = len(text.partition("e")[0].partition(".")[2])
    return f"{float(value):.{digits}{'e' if 'e' in text else 'f'}}"


def meta_row(meta: dict[str, str], items: list[dict]) -> dict:
    texts = {item["name"].removeprefix("meta/"): item.get("text") for item in items if item["name"].startswith("meta/")}
    names = sorted((meta.keys() | texts.keys()) - {"moving_sum"})
    bad = [f"{name}: recorded {meta.get(name)}, replayed {texts.get(name)}" for name in names if meta.get(name) != texts.get(name)]
    verdict = f"DIFFERENT: {bad[0]}" if bad else "equal text"
    return row("meta of the checkpoint", len(names), len(names) - len(bad), verdict, not bad, notes=bad)


def bits_row(facts: dict) -> dict:
    """All bits, on the recordings' own JAX."""
    equal, items = sum(item["equal"] for item in facts["items"]), len(facts["items"])
    if facts["reproduced"]:
        verdict = "equal" if equal == items else "equal with the recordings' kernel emulated: NOT THE RECORDINGS' KERNELS"
        return row("every bit of every item", items, equal, verdict, True)
    if not has_avx512():
        verdict = "not asserted: NOT THE RECORDINGS' KERNELS: no AVX-512 here, only the bound holds"
        return row("every bit of every item", items, equal, verdict, True)
    verdict = "DIFFERENT: also with the recordings' kernel emulated"
    return row("every bit of every item", items, equal, verdict, False, notes=[i["name"] for i in facts["items"] if not i["equal"]][:20])


def has_avx512() -> bool:
    """Whether the processor is of the recording machine's kind. Where that cannot be read, it counts as not."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and re.search(r"\bavx512f\b", cpuinfo.read_text()) is not None


# Running


def sum_of_ones() -> float:
    """The gradient of a weight under bfloat16 products of ONES rows of ones: ONES, unless XLA sums in bfloat16."""
    import jax
    import jax.numpy as jnp

    def total(w, x):
        return jnp.sum((x.astype(jnp.bfloat16) @ w.T.astype(jnp.bfloat16)).astype(jnp.float32))

    x, w = np.ones((32, ONES // 32, 32), np.float32), np.ones((6, 32), np.float32)
    return float(jax.jit(jax.grad(total))(w, x)[0, 0])


def replay(traces: Path, data: Path, case: str, side: str, dumps: Path, xla_flags: str) -> float:
    """Runs one replay; its dump and its facts go to `dumps`. Returns the seconds it took."""
    stem = dump_stem(dumps, case, side)
    command = [sys.executable, "-m", "tests.parity.legacy.replay_recording", str(traces / case), "--data", str(data), "--quiet"]
    own = {REFERENCE: ["legacy_pmap", "--compute", "float64"], NOISE: ["legacy_pmap", "--perturbed"]}
    command += ["--stack", *own.get(side, [side])]
    command += ["--json", f"{stem}.json", "--dump", f"{stem}.npz"]
    Path(f"{stem}.json").unlink(missing_ok=True)
    environment = os.environ | {"XLA_FLAGS": xla_flags}
    if importlib.metadata.version("jax") != RECORDED_JAX:
        # The trainer compiles the step that was compiled before it, and a second case the first one's.
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(dumps.resolve() / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if not Path(f"{stem}.json").exists():
        raise RecordingsError(f"{case}: the replay of {side} failed (exit code {done.returncode}):\n{(done.stdout + done.stderr)[-3000:]}")
    for line in done.stdout.splitlines():
        if line.startswith("NOT THE RECORDINGS' KERNELS"):
            print(f"{case}, {side}: {line}", flush=True)
    return time.perf_counter() - start


def run_replays(traces: Path, cases: Iterable[str], sides: Iterable[str], dumps: Path, jobs: int, bfloat16_flags: str):
    dumps.mkdir(parents=True, exist_ok=True)
    settings = {case: settings_of(traces, case) for case in cases}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(
                replay, traces, traces.resolve().parent / settings[case]["datadir"], case, side, dumps,
                bfloat16_flags if settings[case]["compute"] == "bfloat16" else "",
            ): (case, side)
            for case in cases
            for side in sides
        }  # fmt: skip
        for future in concurrent.futures.as_completed(waiting):
            case, side = waiting[future]
            try:
                print(f"{case}, {side}: replayed in {future.result():.0f} s", flush=True)
            except RecordingsError:
                pool.shutdown(cancel_futures=True)
                raise


def settings_of(traces: Path, case: str) -> dict:
    """The case's settings; its `datadir` is relative to the folder above the recordings."""
    try:
        return read_case(traces / case)[0]
    except (OSError, ValueError) as error:
        raise RecordingsError(f"{traces / case}: not a recording ({error})") from None


def coarsest_of(settings: dict) -> np.dtype:
    """The dtype of the fewest digits that the case's computation goes through; Muon's iteration is in bfloat16."""
    names = [settings["compute"], *("bfloat16" for flag in settings["flags"] if flag in ("bfloat16", "muon"))]
    return functools.reduce(coarser, map(np.dtype, names))


def judge_cases(traces: Path, cases: Iterable[str], stacks: Iterable[str], dumps: Path) -> dict[str, dict]:
    results = {}
    for case in cases:
        recorded, coarsest = read_recording(traces / case), coarsest_of(settings_of(traces, case))
        (reference, _), (noise, _) = (read_replay(dumps, case, side) for side in (REFERENCE, NOISE))
        for stack in stacks:
            replayed = read_replay(dumps, case, stack)
            rows = judge(recorded, replayed, reference, noise, coarsest)
            facts = {name: replayed[1][name] for name in ("jax", "xla_flags", "compute", "kernels")}
            facts["seconds"] = round(replayed[1]["seconds"])
            results.setdefault(case, {})[stack] = {"passed": all(r["passed"] for r in rows), **facts, "rows": rows}
    return results


def print_results(results: dict[str, dict], full: bool):
    from rich.console import Console

    from kgo_shard.diff.report import section_table

    rows = []
    for case, stacks in results.items():
        for stack, result in stacks.items():
            for r in result["rows"]:
                rows.append([case, stack, r["group"], r["items"], r["equal"], "" if r["x_of_limit"] is None else r["x_of_limit"], r["worst"], r["verdict"]])
    section = {"title": "Recordings of the original, JAX 0.4.35, against this JAX", "columns": COLUMNS, "rows": rows, "verdict": ""}
    Console(width=None if sys.stdout.isatty() else 200).print(section_table(section))
    for case, stacks in results.items():
        for stack, result in stacks.items():
            notes = [f"{r['group']}: {note}" for r in result["rows"] for note in (r["notes"] if full else r["notes"][:3])]
            print(f"{case}, {stack}, JAX {result['jax']}: {'PASSED' if result['passed'] else 'FAILED'}", *notes, sep="\n    ", flush=True)


def environment() -> dict[str, str]:
    from kgo_shard.diff.report import environment_facts

    own = ("devices", "mode", "XLA_FLAGS")  # of this process; the replays have their cases'
    return {name: value for name, value in environment_facts().items() if name not in own}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="the folder of recordings")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--stacks", nargs="+", choices=STACKS, help="default: all that run on this JAX")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--dumps", type=Path, help="keep the replays in this folder")
    parser.add_argument("--judge-only", action="store_true", help="judge the replays in --dumps, run none")
    parser.add_argument("--jobs", type=int, default=2, help="replays at a time")
    parser.add_argument("--as-is", action="store_true", help="let XLA sum bfloat16 products as it does, see REASONS")
    arguments = parser.parse_args(argv)
    if arguments.judge_only and not arguments.dumps:
        parser.error("--judge-only needs --dumps")
    old_jax = importlib.metadata.version("jax") == RECORDED_JAX
    stacks = arguments.stacks or (STACKS[:1] if old_jax else STACKS)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    ones, bfloat16_flags = sum_of_ones(), ""
    if ones != ONES:
        bfloat16_flags = "" if arguments.as_is else WITHOUT_YNNPACK
        action = "bfloat16 cases are replayed as they are" if arguments.as_is else f"bfloat16 cases are replayed with {WITHOUT_YNNPACK}"
        print(f"XLA SUMS BFLOAT16 PRODUCTS IN BFLOAT16: {ONES} ones make {ones:g} here; {action}", flush=True)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            dumps = arguments.dumps or Path(temporary)
            if not arguments.judge_only:
                run_replays(arguments.traces, arguments.cases, (*stacks, REFERENCE, NOISE), dumps, arguments.jobs, bfloat16_flags)
            results = judge_cases(arguments.traces, arguments.cases, stacks, dumps)
    except RecordingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_results(results, full=arguments.json is None)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "date": datetime.date.today().isoformat(),
            "environment": environment(),
            f"bfloat16 sum of {ONES} ones": ones,
            "limits": [limit._asdict() for limit in LIMITS],
            "reasons": dict(REASONS),
            "cases": results,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    failed = [f"{case} ({stack})" for case, entry in results.items() for stack, result in entry.items() if not result["passed"]]
    total = sum(len(entry) for entry in results.values())
    print(f"{total - len(failed)} of {total} replays kept every limit" + (": broken by " + ", ".join(failed) if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
