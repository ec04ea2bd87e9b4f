"""What was found, for people: a table in the terminal, a JSON file, and one page for the browser.

A report is a plain dict:
    {"title": str, "environment": {name: text}, "sections": [section, ...], "verdict": str}
and a section is
    {"title", "text", "columns": [str], "rows": [[cell, ...]], "verdict": str, "image_png": bytes or None}
with an optional "data", which goes into the JSON file only. Text that starts with one of BAD_WORDS is shown as bad.
"""

import base64
import html
import importlib.metadata
import io
import itertools
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from kgo_shard.diff.compare import STAGES, Comparison, LeafResult
from kgo_shard.diff.limits import LIMITS

GOOD_WORDS = ("EQUAL", "WITHIN", "PASSED", "equal", "within", "passed")
BAD_WORDS = ("DIFFERENT", "FAILED")

STAGE_COLUMNS = ("stage", "leaves", "equal bits", "worst leaf", "max ulp", "relative norm", "x of limit", "verdict")
LEAF_COLUMNS = (
    "step", "stage", "leaf", "shape", "dtype", "max ulp", "relative norm", "old error", "new error", "limit", "x of limit",
    "verdict",
)  # fmt: skip


# Rows of a comparison


def comparison_rows(comparison: Comparison, all_leaves: bool = False) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and rows of text: the worst leaf of each stage over all steps, or every leaf of every step.

    A stage that neither side recorded has a row too: what was not looked at must be seen.
    """
    if all_leaves:
        return LEAF_COLUMNS, [leaf_row(leaf) for leaf in comparison.leaves]
    stages = [*STAGES, *sorted({leaf.stage for leaf in comparison.leaves} - set(STAGES))]
    return STAGE_COLUMNS, [stage_row(stage, [leaf for leaf in comparison.leaves if leaf.stage == stage]) for stage in stages]


def stage_row(stage: str, leaves: list[LeafResult]) -> list[str]:
    if not leaves:
        return [stage, "0", "", "", "", "", "", "not recorded"]
    worst = max(leaves, key=badness)
    failed = sum(not leaf.passed for leaf in leaves)
    first = next((leaf for leaf in leaves if not leaf.passed), None)
    if first is not None:
        verdict = f"DIFFERENT: {failed} leaves, first at step {first.step}"
    else:
        verdict = "equal" if all(leaf.equal_bits for leaf in leaves) else "within limits"
    where = f"step {worst.step}" + (f", {worst.leaf}" if worst.leaf else "")
    return [
        stage,
        str(len(leaves)),
        f"{sum(leaf.equal_bits for leaf in leaves)}/{len(leaves)}",
        where if verdict != "equal" else "",
        show(max((leaf.max_ulp for leaf in leaves if leaf.max_ulp is not None), default=None)),
        show(max((leaf.relative_norm for leaf in leaves if leaf.relative_norm is not None), default=None)),
        show(worst.x_of_limit),
        verdict,
    ]


def leaf_row(leaf: LeafResult) -> list[str]:
    if not leaf.passed:
        verdict = f"DIFFERENT: {leaf.reason}"
    else:
        verdict = "equal" if leaf.equal_bits else "within limits"
    numbers = (leaf.max_ulp, leaf.relative_norm, leaf.error_a, leaf.error_b, leaf.limit, leaf.x_of_limit)
    shape = "x".join(map(str, leaf.shape)) or "scalar"
    return [str(leaf.step), leaf.stage, leaf.leaf, shape, leaf.dtype, *map(show, numbers), verdict]


def badness(leaf: LeafResult) -> tuple[float, ...]:
    """Orders leaves: those without numbers (missing, NaN) are worst, then failed ones, then by the share of the limit."""
    return (
        not leaf.passed and leaf.max_ulp is None,
        not leaf.passed,
        leaf.x_of_limit or 0.0,
        leaf.relative_norm or 0.0,
        leaf.max_ulp or 0,
    )


def show(number: float | int | None) -> str:
    if number is None:
        return ""
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def comparison_section(comparison: Comparison, title: str, text: str = "", all_leaves: bool = False) -> dict:
    """The section of a report that shows a comparison; every leaf goes into its data."""
    columns, rows = comparison_rows(comparison, all_leaves)
    return {
        "title": title,
        "text": text,
        "columns": list(columns),
        "rows": rows,
        "verdict": comparison.verdict(),
        "image_png": None,
        "data": to_json(comparison),
    }


def limits_section() -> dict:
    """The section that prints the table of limits and their reasons."""
    return {
        "title": "Limits and their reasons",
        "text": "Nothing else bounds an error anywhere.",
        "columns": ["limit of", "is", "because"],
        "rows": [list(limit) for limit in LIMITS],
        "verdict": "",
        "image_png": None,
    }


def to_json(comparison: Comparison) -> dict:
    """Everything that is known about a comparison, as JSON takes it (infinity as text)."""
    return {
        "verdict": comparison.verdict(),
        "equal": comparison.equal,
        "steps": comparison.steps,
        "has_reference": comparison.has_reference,
        "first_bad": None if comparison.first_bad is None else finite(comparison.first_bad._asdict()),
        "leaves": [finite(leaf._asdict()) for leaf in comparison.leaves],
    }


def finite(value):
    """`value` with tuples as lists and NaN and infinity as text: JSON has neither."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, np.generic):
        return finite(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# Terminal


def comparison_table(comparison: Comparison, title: str = "", all_leaves: bool = False) -> Table:
    """The comparison as a table for the terminal; the verdict stands below it."""
    columns, rows = comparison_rows(comparison, all_leaves)
    return section_table({"title": title, "columns": columns, "rows": rows, "verdict": comparison.verdict()})


def nonfinite_section(found, shown: int = 30) -> dict:
    """The leaves of a stopped step (a `replay.Nonfinite`) that are not finite, in the order of computation, up to the gradient."""
    rows = []
    for name, leaf in found.stages.items():
        finite = np.isfinite(np.asarray(leaf, np.float64))
        if name.startswith(("loss_terms/", "raw_gradient/")) and not finite.all():
            rows.append([name, f"{finite.size - finite.sum():,} of {finite.size:,}"])
    if len(rows) > shown:
        rows = rows[:shown] + [[f"and {len(rows) - shown} more", ""]]
    return {
        "title": "Leaves that are not finite",
        "text": "Numbers of all devices together.",
        "columns": ["stage/leaf", "numbers"],
        "rows": rows,
        "verdict": found.verdict(),
        "image_png": None,
    }


def section_table(section: dict) -> Table:
    """Any section of a report as a table for the terminal."""
    table = Table(title=section["title"] or None, caption=section["verdict"] or None, caption_justify="left")
    for index, name in enumerate(section["columns"]):
        # A leaf's name is what people copy, so it is folded and never cut; the first column is what a row is about.
        table.add_column(str(name), overflow="fold", no_wrap=index == 0)
    for row in section["rows"]:
        table.add_row(*(plain(cell) for cell in row), style="bold red" if any(is_bad(cell) for cell in row) else None)
    return table


def plain(cell: object) -> str:
    """Text for rich, with brackets that are not markup."""
    return str(cell).replace("[", r"\[")


def is_bad(cell: object) -> bool:
    return str(cell).startswith(BAD_WORDS)


# Files


def write_report(report: dict, folder: str | Path) -> tuple[Path, Path]:
    """Writes `report.json` and `report.html` into `folder` (made if need be) and returns their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / "report.json", folder / "report.html"
    sections = [{key: value for key, value in section.items() if key != "image_png"} for section in report["sections"]]
    text = json.dumps(finite({**report, "sections": sections}), indent=1, allow_nan=False)
    json_path.write_text(text + "\n", encoding="utf-8")
    html_path.write_text(render_html(report), encoding="utf-8")
    return json_path, html_path


STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #ff7b72; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { font-weight: 600; padding: .6rem .8rem; border-left: .3rem solid var(--line); background: var(--soft); }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
.good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th { background: var(--soft); white-space: nowrap; } tr.bad td { font-weight: 600; }
/* A cell breaks between words only and has room for some: a table wider than the screen scrolls by itself, not the page. */
td { overflow-wrap: normal; min-width: 3rem; max-width: 26rem; } td.text { min-width: 11rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .8rem; font-size: .9rem; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; }
img { max-width: 100%; height: auto; background: #fff; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
"""


def render_html(report: dict) -> str:
    """The whole report as one page that needs nothing else: styles inside, pictures as data, every text escaped."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report["environment"].items())
    sections = "".join(section_html(section) for section in report["sections"])
    title = escape(report["title"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{verdict_html(report["verdict"])}
{sections}
<section>
<h2>Environment</h2>
<dl>{facts}</dl>
</section>
</body>
</html>
"""


def section_html(section: dict) -> str:
    parts = [f"<h2>{escape(section['title'])}</h2>"]
    if section["text"]:
        parts.append(f"<p>{escape(section['text'])}</p>")
    parts.append(verdict_html(section["verdict"]))
    if section["rows"]:
        head = "".join(f"<th>{escape(column)}</th>" for column in section["columns"])
        body = "".join(row_html(row) for row in section["rows"])
        parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')
    if section["image_png"]:
        data = base64.b64encode(section["image_png"]).decode("ascii")
        parts.append(f'<img alt="{escape(section["title"])}" src="data:image/png;base64,{data}">')
    return f"<section>{''.join(parts)}</section>\n"


def row_html(row: list) -> str:
    cells = []
    for cell in row:
        classes = " ".join(filter(None, [color(cell), "text" if len(str(cell)) > 24 else ""]))
        cells.append(f'<td class="{classes}">{escape(cell)}</td>' if classes else f"<td>{escape(cell)}</td>")
    return f"<tr{' class=bad' if any(is_bad(cell) for cell in row) else ''}>{''.join(cells)}</tr>"


def verdict_html(verdict: str) -> str:
    return f'<p class="verdict {color(verdict)}">{escape(verdict)}</p>' if verdict else ""


def color(text: object) -> str:
    """The style class of a verdict; "" for any other text."""
    if is_bad(text):
        return "bad"
    return "good" if str(text).startswith(GOOD_WORDS) else ""


def escape(text: object) -> str:
    return html.escape(str(text))


# Where it ran


def environment_facts() -> dict[str, str]:
    """Versions, devices and modes that a reader needs to judge the rest. Starts JAX's backend."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    return {
        "JAX": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "NumPy": np.__version__,
        "Python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": f"{processor()}, {os.cpu_count()} logical cores",
        "devices": f"{len(devices)} x {', '.join(kinds)} ({jax.default_backend()})",
        "pmap": pmap_implementation(),
        "mode": exact_mode(os.environ.get("XLA_FLAGS", "")),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") or "not set",
        "commit": git_commit(Path(__file__).parent),
    }


def pmap_implementation() -> str:
    """Which of the three programs `jax.pmap` is here: only the first is what the old stack was written for.

    0.7.2 knows the merge switch already (off by default), 0.8 and 0.9 have it on, and from 0.10 there is nothing to switch.
    """
    switch = getattr(jax.config, "jax_pmap_shmap_merge", None)
    if switch is None:
        # The original runtime went away with the switch; a JAX older than both is older than this package supports.
        return "pmap is jit(shard_map)" if jax.__version_info__ >= (0, 8) else "original pmap runtime"
    if jax.__version_info__ < (0, 8) and not switch:
        return "original pmap runtime"
    state = "on" if switch else "off, so this is the original pmap runtime"
    return f"pmap merged onto jit+shard_map, switchable (jax_pmap_shmap_merge is {state})"


def exact_mode(flags: str) -> str:
    """Whether `flags` (XLA_FLAGS) keep the compiler from fusing and contracting arithmetic."""
    words = flags.split()
    disabled = [word.partition("=")[2].split(",") for word in words if word.startswith("--xla_disable_hlo_passes=")]
    # XLA takes the last of several.
    if not disabled or "fusion" not in disabled[-1]:
        return "default: the compiler may fuse, so the last bits depend on it"
    sse = "--xla_cpu_max_isa=SSE4_2" in words
    return "exact: no fusion" + (", no contraction (SSE4_2)" if sse else "; the instruction set is not limited")


def processor() -> str:
    """The processor's name where the system tells it: last bits depend on its matrix kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit(folder: Path) -> str:
    """The commit of the checkout that holds `folder`, marked where files differ from it; "unknown" outside of one."""
    try:
        run = [["rev-parse", "HEAD"], ["status", "--porcelain"]]
        head, changes = (
            subprocess.run(["git", "-C", folder, *args], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for args in run
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head} with changes" if changes else head


# Pictures


def plot_losses(curves: dict[str, list[float]]) -> bytes:
    """PNG of loss curves by label, and below them each curve's difference from the first one.

    Equal curves stay visible: the first is thick and light, the others lie on it thin and dashed. ValueError: no curve, an
    empty one, or curves of different lengths.
    """
    lengths = {len(losses) for losses in curves.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"loss curves must be of one length and not empty: {({k: len(v) for k, v in curves.items()})}")
    figure = Figure(figsize=(7, 5), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    labels = list(curves)
    steps = np.arange(1, lengths.pop() + 1)
    first = np.asarray(curves[labels[0]], np.float64)
    upper.plot(steps, first, color="#9ecae1", linewidth=6, label=labels[0], solid_capstyle="round")
    lower.axhline(0, color="#9ecae1", linewidth=6)
    styles = itertools.cycle((("#08306b", (4, 3)), ("#a50f15", (2, 2)), ("#00441b", (6, 2)), ("#4a1486", (1, 2))))
    for label, (line_color, dashes) in zip(labels[1:], styles):
        other = np.asarray(curves[label], np.float64)
        upper.plot(steps, other, color=line_color, linewidth=1.4, dashes=dashes, label=label)
        lower.plot(steps, other - first, color=line_color, linewidth=1.4, dashes=dashes)
    upper.set_ylabel("loss")
    upper.legend()
    lower.set_ylabel(f"minus {labels[0]}")
    lower.set_xlabel("step")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    canvas.print_png(picture)
    return picture.getvalue()


def plot_errors(comparison: Comparison) -> bytes:
    """PNG of every leaf's error against float64 over its limit, by stage: left of the line is within. ValueError without a reference."""
    leaves = [leaf for leaf in comparison.leaves if leaf.x_of_limit]
    if not leaves:
        raise ValueError("no leaf has an error against a reference: there is nothing to draw")
    stages = [stage for stage in STAGES if any(leaf.stage == stage for leaf in leaves)]
    figure = Figure(figsize=(7, 0.5 + 0.4 * len(stages)), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    spread = np.random.default_rng(0)
    for row, stage in enumerate(stages):
        x = np.array([leaf.x_of_limit for leaf in leaves if leaf.stage == stage])
        axes.scatter(x, row + spread.uniform(-0.25, 0.25, len(x)), s=4, alpha=0.4, linewidths=0, color="#08306b")
    axes.axvline(1, color="#a50f15")
    axes.set(xscale="log", xlabel="error of the new side / limit", yticks=range(len(stages)), yticklabels=stages)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    picture = io.BytesIO()
    canvas.print_png(picture)
    return picture.getvalue()
