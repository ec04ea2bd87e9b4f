"""One or several runs as one picture: what they logged, over the training samples.

A run's figures come from its `metrics.jsonl`, or from the log lines that the original's trainer and this one print. The
x axis is the training samples throughout: the time column starts again whenever a run is resumed.
"""

import io
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from .journal import LOG, METRICS
from .loss import EVALUATION_SEKI_WEIGHT

PICTURE = "plot.png"
TRAIN, VALIDATION = "train", "validation"


class PlotError(ValueError):
    """Runs that cannot be drawn, or a picture that cannot be written; the message names the file and what to do."""


class Panel(NamedTuple):
    """One panel: the figure's name in the journal, its title, the y axis' label, and whether curves far apart may make it logarithmic."""

    figure: str
    title: str
    label: str
    may_be_log: bool = True


PANELS = (
    Panel("loss", "loss", "loss (weighted sum per row)"),
    Panel("p0loss", "policy: p0loss", "p0loss (nats per row)"),
    Panel("vloss", "value: vloss", "vloss (1.2 × nats per row)"),
    Panel("oloss", "ownership: oloss", "oloss (1.5 × nats per point)"),
    Panel("skloss", f"seki: skloss (validation weighs it by {EVALUATION_SEKI_WEIGHT:g})", "skloss (weighted nats per point)"),
    Panel("pacc1", "policy accuracy: pacc1", "pacc1 (share of rows)", may_be_log=False),
    Panel("lr", "learning rate", "learning rate (per step)"),
    Panel("grad_norm", "gradient norm", "gradient norm (L2)"),
    Panel("sps", "throughput", "throughput (samples/s)"),
)
FIGURES = tuple(panel.figure for panel in PANELS)
LOG_RATIO = 10  # curves further apart than this share a panel on a logarithmic axis only

# The log lines of both trainers, each from its first word to its last: half a line is none. Whatever stands before (a time
# stamp, say) is not looked at.
TRAIN_LINE = re.compile(r"\bstep=\d+, samples=(?P<samples>\d+), (?P<figures>time=\S+s, .*\bMFU=(?:\d+\.\d\d|nan|inf)%)")
VALIDATION_LINE = re.compile(r"\bVAL \[(?P<samples>\d+) samples\]: (?P<figures>loss=.*\bpacc1=(?:-?\d+\.\d{4}|nan|-?inf))")
FIGURE = re.compile(r"\b(\w+)=(off|[-+.\w]+?)s?%?(?:, |$)")


class Record(NamedTuple):
    """One log line: its kind, the training samples when it was written, and the figures of FIGURES that it has (NaN: not a number)."""

    kind: str
    samples: int
    figures: dict[str, float]


@dataclass
class Run:
    """A run's name, where its figures were read, and its records by kind, in the order of their samples."""

    name: str
    path: Path
    records: dict[str, list[Record]] = field(default_factory=lambda: {TRAIN: [], VALIDATION: []})

    def add(self, record: Record):
        """Append; what the run had logged beyond it was lost when it went on from an older checkpoint, and goes."""
        for kind, kept in self.records.items():
            # A validation has the samples of the window before it, which stays.
            first_lost = record.samples if kind == record.kind or record.kind == TRAIN else record.samples + 1
            while kept and kept[-1].samples >= first_lost:
                kept.pop()
        self.records[record.kind].append(record)

    def curve(self, kind: str, figure: str) -> tuple[np.ndarray, np.ndarray]:
        """Samples and values, (n,) float64 each; NaN where a line has no such figure."""
        points = [(record.samples, record.figures.get(figure, math.nan)) for record in self.records[kind]]
        samples, values = np.array(points, np.float64).reshape(-1, 2).T
        return samples, values


# Reading


def read_run(path: str | Path) -> Run:
    """The figures of a run folder or of a log file. Raises PlotError."""
    path = Path(path)
    source = path
    if path.is_dir():
        source = next((path / name for name in (METRICS, LOG) if (path / name).is_file()), None)
        if source is None:
            raise PlotError(f"{path}: holds neither {METRICS} nor {LOG}: name a run folder, or the file that the trainer's output went to")
    try:
        content = source.read_bytes()
    except FileNotFoundError:
        raise PlotError(f"{path}: no such file or folder: name a run folder or a log file") from None
    except OSError as error:
        raise PlotError(f"{source}: cannot be read ({error.strerror}): name a run folder or a log file that can") from None
    run = Run(run_name(path), source)
    for record in read_journal(source, content) if content.lstrip().startswith(b"{") else read_log(content):
        run.add(record)
    if not any(run.records.values()):
        raise PlotError(f"{source}: holds no figures: wait for the run's first log line, or name the file that the trainer's output went to")
    return run


def run_name(path: Path) -> str:
    """A run is called by its folder; a file of another name than the trainer's own by itself."""
    whole = path.resolve()
    return whole.parent.name if whole.name in (METRICS, LOG) and not path.is_dir() else whole.name


def read_journal(path: Path, content: bytes) -> Iterator[Record]:
    """The records of a `metrics.jsonl`. PlotError names the line that is broken; the last may be torn: the run was killed as it wrote it."""
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = to_record(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # nothing ended it
                return
            message = " ".join(str(error).split())
            raise PlotError(f"{path}: line {number} is broken ({message}): take it out, or draw the run's printed log instead") from None
        if record is not None:
            yield record


def to_record(entry: object) -> Record | None:
    """The record of a parsed line; None where it is of another kind. ValueError where it is none at all."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise ValueError("no object with a kind")
    if entry["kind"] not in (TRAIN, VALIDATION):
        return None
    samples = entry.get("samples")
    if type(samples) is not int or samples < 0:
        raise ValueError(f"samples is {samples!r}, expected a count")
    figures = {}
    for name in FIGURES:
        value = entry.get(name)
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{name} is {value!r}, expected a number or null")
        figures[name] = finite(value)
    return Record(entry["kind"], samples, figures)


def read_log(content: bytes) -> Iterator[Record]:
    """The records among the lines of a printed log; every other line is somebody else's."""
    for line in content.decode("utf-8", errors="replace").splitlines():
        for kind, pattern in ((TRAIN, TRAIN_LINE), (VALIDATION, VALIDATION_LINE)):
            if found := pattern.search(line):
                try:
                    figures = {name: finite(float(value)) for name, value in FIGURE.findall(found["figures"]) if name in FIGURES and value != "off"}
                except ValueError:
                    continue  # two processes wrote into one line
                yield Record(kind, int(found["samples"]), figures)


def finite(value: float | None) -> float:
    """NaN for what no axis can show."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


# Drawing


def draw(runs: Sequence[Run]) -> Figure:
    """The picture of `runs`: a panel for each of PANELS, a colour for each run, training windows as lines, validations as markers."""
    figure = Figure(figsize=(15, 10.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 3, sharex=True)
    colors = run_colors(len(runs))
    for axes, panel in zip(panels.flat, PANELS):
        draw_panel(axes, panel, runs, colors)
    panels[0, 0].set_xlim(left=0)
    for axes in panels[-1]:
        axes.set_xlabel("training samples")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    add_legend(figure, runs, colors)
    return figure


def draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run], colors: Sequence):
    levels = []
    for index, (run, color) in enumerate(zip(runs, colors)):
        for kind in (TRAIN, VALIDATION):
            samples, values = run.curve(kind, panel.figure)
            shown = values[np.isfinite(values)]
            if len(shown):
                levels.append(level(panel, shown))
                axes.plot(samples, values, color=color, zorder=3 if kind == VALIDATION else 2, **curve_style(kind, len(runs), index, len(shown)))
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_ylabel(panel.label)
    axes.grid(alpha=0.3)
    if not levels:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="#777777")
    elif panel.may_be_log and min(levels) > 0 and max(levels) > LOG_RATIO * min(levels):
        axes.set_yscale("log")
        if panel.figure == "lr":  # the ends of warm-up and cosine would take most of the decades
            axes.set_ylim(bottom=min(levels) / 100)
    elif panel.figure in ("lr", "sps"):
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 5))


def level(panel: Panel, values: np.ndarray) -> float:
    """About where a curve lies; 0 where it has no logarithm. A learning rate is called by its peak, and ends at zero."""
    if panel.figure == "lr":
        return values.max()
    return np.median(values) if values.min() > 0 else 0.0


def curve_style(kind: str, num_runs: int, index: int, num_points: int) -> dict:
    """How a run's training windows or validations are drawn."""
    if kind == VALIDATION:
        size = 6 if num_points <= 40 else 3.5
        return {"linestyle": "none", "marker": "o", "markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.6}
    # Among many colours the neighbours look alike: their dashes tell them apart.
    dashes = ("-", "--", "-.")[index % 3] if num_runs > len(FEW_COLORS) else "-"
    # A line of one point would not be seen.
    return {"linestyle": dashes, "linewidth": 1.4, "marker": "_" if num_points == 1 else None, "markersize": 9}


# Told apart also by most people who see fewer colours (Okabe and Ito), the yellow left out: it fades on white.
FEW_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")


def run_colors(count: int) -> list:
    """A colour for each of `count` runs, no two equal."""
    if count <= len(FEW_COLORS):
        return list(FEW_COLORS[:count])
    return [tuple(color) for color in matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, count))]


# Names of runs may be Chinese, Japanese or Korean, which Matplotlib's own font cannot write: the first of these that is there does.
WIDE_FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "Microsoft YaHei", "PingFang SC", "SimHei", "Arial Unicode MS")


def add_legend(figure: Figure, runs: Sequence[Run], colors: Sequence):
    """Below the panels, where any number of names has room; in grey what lines and markers are."""
    handles, names = [], []
    for index, (run, color) in enumerate(zip(runs, colors)):
        handles.append(Line2D([], [], color=color, **(curve_style(TRAIN, len(runs), index, 2) | {"linewidth": 2.2})))
        names.append(shorten(run.name))
    for kind, says in ((TRAIN, "training windows"), (VALIDATION, "validation")):
        if any(run.records[kind] for run in runs):
            handles.append(Line2D([], [], color="#777777", **curve_style(kind, 1, 0, 2)))
            names.append(says)
    columns = max(1, min(len(names), 6, 130 // (max(map(len, names)) + 6)))
    legend = figure.legend(handles, ["run"] * len(names), loc="outside lower center", ncols=columns, frameon=False)
    fonts = [*matplotlib.rcParams["font.family"], *(name for name in WIDE_FONTS if name in get_font_names())]
    for text, name in zip(legend.get_texts(), names):  # set here, so that a name with _ before it or $ in it is just a name
        text.set_parse_math(False)
        text.set_fontfamily(fonts)
        text.set_text(name)


def shorten(name: str, width: int = 48) -> str:
    """A long name without its middle: names of runs differ at their ends."""
    return name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-(width // 2) :]}"


def tell_apart(runs: Sequence[Run]):
    """Give runs of one name more of their paths as names, until they differ or there is no more."""
    for depth in range(2, max(len(run.path.resolve().parts) for run in runs) + 1):
        names = [run.name for run in runs]
        for run in runs:
            if names.count(run.name) > 1:
                whole = run.path.resolve()
                parts = (whole.parent if whole.name in (METRICS, LOG) else whole).parts
                run.name = "/".join(parts[-depth:])


# Writing


def plot(paths: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Draw runs (folders or log files) into `out`, and return where it is: without `out` in the folder of the only run, else here.

    Raises PlotError.
    """
    target = default_picture(paths) if out is None else Path(out)
    if target.is_dir():
        raise PlotError(f"--out {target}: is a folder: name a file in it")
    if target.suffix.lower() != ".png":
        raise PlotError(f"--out {target}: the picture is a PNG: name a file that ends in .png")
    runs = [read_run(path) for path in paths]
    tell_apart(runs)
    write_picture(target, draw(runs))
    return target


def default_picture(paths: Sequence[str | Path]) -> Path:
    only = Path(paths[0])
    return only / PICTURE if len(paths) == 1 and only.is_dir() else Path(PICTURE)


def write_picture(path: Path, figure: Figure):
    """Beside, then renamed: a picture that somebody looks at is never half a one. PlotError where it cannot be written."""
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a run's name in letters that no font here has
        figure.canvas.print_png(picture)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(picture.getvalue())
        os.replace(beside, path)
    except OSError as error:
        try:
            beside.unlink(missing_ok=True)
        except OSError:
            pass  # its folder is what cannot be written
        raise PlotError(f"{path}: cannot be written ({error.strerror}): name another place with --out FILE.png") from None
