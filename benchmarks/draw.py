"""Tables and pictures of the results, and the README's section about performance: drawn from the JSON, no number copied by hand.

    python -m benchmarks.draw [--results FOLDER] [--readme FILE]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from . import measure
from .tables import (
    components_table,
    input_table,
    masters_table,
    quality_lines,
    scaling_table,
    split_lines,
    split_table,
    step_table,
    sweep_table,
    utilisation_lines,
)

BEGIN, END = "<!-- drawn by benchmarks.draw: begin -->", "<!-- drawn by benchmarks.draw: end -->"
COLOURS = {"pmap": "tab:orange", "shard_map": "tab:blue"}


def machine_lines(results: dict[str, dict]) -> list[str]:
    """Each machine with its software, once, and the questions that were asked there."""
    asked: dict[str, list[str]] = {}
    for name, result in results.items():
        facts = result["environment"]
        line = f"{facts['processor']}, {facts.get('memory', 'memory not noted')}, {facts['devices'].partition(' x ')[2]}"
        asked.setdefault(f"{line}; JAX {facts['JAX']} ({facts['pmap']}), Python {facts['Python']}, {facts['platform']}", []).append(name)
    return [f"- {line}: {', '.join(names)}" for line, names in asked.items()]


def work_line(result: dict) -> str:
    """What was run, when, from which commit."""
    facts, settings = result["environment"], result["settings"]
    forms = {
        "model_kind": "{}",
        "pos_len": "pos_len {}",
        "batch_size": "batch {}",
        "optimizer": "{}",
        "compute_dtype": "{}",
        "devices": "{} devices",
        "rows": "rows of {}",
    }
    commit = facts["commit"][:10] + (" with changes" if "changes" in facts["commit"] else "")
    return ", ".join(form.format(settings[name]) for name, form in forms.items() if name in settings) + f"; commit {commit}, {result['date']}"


def goal(text: str, value: float, limit: float, at_most: bool, interval: tuple[float, float] | None = None) -> str:
    """One line; where the figure's 90 % interval is given, the verdict is that of the whole interval, or open."""
    low, high = interval or (value, value)
    if not at_most:
        low, high, value, limit = -high, -low, -value, -limit
    verdict = "reached" if high <= limit else "**not reached**" if low > limit else "**open**: the goal lies within the interval"
    shown = " (90 % interval {:.3f} to {:.3f})".format(*interval) if interval else ""
    return f"- {text}: {abs(value):.4g}{shown}, the goal {'at most' if at_most else 'at least'} {abs(limit):g}: {verdict}"


def latencies(result: dict, name: str) -> list[float]:
    return [step["whole"] for step in result["samples"][name]["latency"]]


def goals(results: dict[str, dict]) -> list[str]:
    """What the migration was to reach, and whether it did."""
    lines = []
    if "step-adamw" in results:
        found = results["step-adamw"]
        interval = measure.ratio_interval(latencies(found, "shard_map"), latencies(found, "pmap"))
        lines.append(goal("latency of an AdamW step, shard_map / pmap", found["ratios"]["latency"]["shard_map"], 1.0, True, interval))
        interval = measure.ratio_interval(found["samples"]["shard_map"]["rate"], found["samples"]["pmap"]["rate"])
        lines.append(goal("time of one of several AdamW steps in a row, shard_map / pmap", found["ratios"]["rate"]["shard_map"], 1.0, True, interval))
    if "split_state" in results:
        found = results["split_state"]
        for rule, limit in (("adamw", 1.0), ("muon", 0.78)):
            interval = measure.ratio_interval(found["samples"][f"split, {rule}"], found["samples"][f"pmap, {rule}"])
            lines.append(goal(f"a step with split state, {rule}, of pmap's", found["ratios"][f"split, {rule}"], limit, True, interval))
        times = [found["samples"][name] for name in ("split, adamw", "split, muon", "pmap, adamw", "pmap, muon")]
        interval = measure.interval(lambda plain, muon, pmap_plain, pmap_muon: (muon - plain) / (pmap_muon - pmap_plain), *times)
        lines.append(goal("what full Muon adds to it, of what it adds to pmap's", found["ratios"]["added by Muon, split"], 0.25, True, interval))
        lines.append(goal("the split Muon step on most devices, of one device's", found["growth"]["largest to one device"], 1.15, True))
        held = found["bytes_held"]
        lines.append(goal("bytes of state on a device, split / replicated", held["split, muon"] / held["replicated, muon"], 0.2, True))
    if "input" in results:
        found = results["input"]
        for place in ("host", "finished"):
            lines.append(
                goal(
                    f"rows a second with history, {place}, ours / the original's", found["ratios"][f"with history and symmetry, {place}"], 4.0, False
                )
            )
        lines.append(goal("KB of a row to the device", found["bytes_a_row"]["ours"] / 1e3, 6.0, True))
    return lines


def section(results: dict[str, dict]) -> str:
    """The README's section: the machines, the goals, then every question whose result is there. Empty where there is none."""
    parts = ["\n".join(lines) for lines in (machine_lines(results), goals(results)) if lines]

    def add(name: str, title: str, text: str, *more: str):
        if name in results:
            parts.extend([f"**{title}** ({work_line(results[name])}). {text}".strip(), *filter(None, more)])

    def of(name: str, draw):
        return draw(results[name]) if name in results else ""

    for name in ("step-adamw", "step-muon"):
        add(
            name,
            f"One training step, {name.removeprefix('step-')}",
            "Beside `ms`, times are multiples of pmap's median in the same run.",
            of(name, step_table),
            of(name, lambda found: "\n".join(f"- {other}: not timed, for unequal work is refused: {reason}" for other, reason in found["refused"].items())),
        )
    add(
        "split_state",
        "State split over the devices",
        "Steps in turns in one process.",
        of("split_state", split_table),
        of("split_state", lambda found: "\n".join(f"- {line}" for line in split_lines(found))),
    )
    add(
        "masters",
        "bfloat16 parameters and float32 masters",
        of("masters", lambda found: f"After {found['settings']['samples']} rows, all seven dtypes bfloat16 but in the first row."),
        of("masters", masters_table),
    )
    sizes = results.get("input", {}).get("bytes_a_row", {"ours": 0, "original": 0})
    add(
        "input",
        "Input",
        f"Rows a second from compressed files of thousands of rows; a row is {sizes['ours']:.0f} bytes to the device, the original's {sizes['original']:.0f}.",
        of("input", input_table),
    )
    add(
        "scaling",
        "Scaling",
        of("scaling", lambda found: found["statement"]),
        of("scaling", scaling_table),
        "![Scaling](benchmarks/results/scaling.png)",
    )
    add("components", "Parts of a step", "Compiled apart; sums need not agree with the whole, see `benchmarks/components.py`.",
        of("components", components_table), of("components", lambda found: "\n".join(f"- {line}" for line in utilisation_lines(found))))  # fmt: skip
    add(
        "quality",
        "Fixed quality",
        "",
        of("quality", lambda found: "\n".join(f"- {line}" for line in quality_lines(found))),
        "![Fixed quality](benchmarks/results/quality.png)",
    )
    add("sweep", "Sweep", "", of("sweep", sweep_table))
    stalls = results.get("save_stall", {}).get("ratios")
    add("save_stall", "Saving", stalls and f"The loop stands still for {stalls['stall']:.3f} of the original's blocking save; a step beside a save takes "
        f"{stalls['beside']:.2f} times as long, so that on these shared cores a save costs {stalls['cost']:.1f} times what the blocking one does "
        "(it is compressed, with checksums); a second start takes "
        + ", ".join(f"{ratio:.2f} of the first on {devices} device{'s' if int(devices) > 1 else ''}" for devices, ratio in stalls["start"].items()) + ".")  # fmt: skip
    cost = results.get("diff_cost", {}).get("ratios")
    add(
        "diff_cost",
        "Comparing",
        cost and f"A comparison of the whole state after every step takes {cost['diff']:.2f} times what both sides take without.",
    )
    if any(result["environment"]["devices"].endswith("(cpu)") for result in results.values()):
        parts.append(
            "Logical CPU devices share the cores: `one device` with the same batch is what the others can reach at best there, and nothing here is a "
            "speed-up of real devices."
        )
    return "\n\n".join(parts)


def draw_scaling(result: dict, axes):
    for mode, style in (("fixed global batch", "o-"), ("fixed local batch", "s--")):
        for name, colour in COLOURS.items():
            rows = [row for row in result["rows"] if row["mode"] == mode and "samples" in row]
            axes.plot(
                [row["devices"] for row in rows],
                [1e3 * statistics.median(row["samples"][name]) for row in rows],
                style,
                color=colour,
                label=f"{name}, {mode}",
            )
    axes.set(xscale="log", yscale="log", xlabel="devices" + (" (logical, sharing the cores)" if result["shared_cores"] else ""), ylabel="ms a step")
    axes.set_xticks(counts := sorted({row["devices"] for row in result["rows"]}), map(str, counts), minor=False)
    axes.legend()


def draw_quality(result: dict, axes):
    for name, curves in result["samples"].items():
        for seed, found in enumerate(curves):
            samples, _, losses = zip(*found["curve"], strict=True)
            axes.plot(
                samples,
                losses,
                "-" if name == "pmap" else ":",
                color=COLOURS[name],
                linewidth=1 if name == "pmap" else 3,
                label=None if seed else name,
            )
    axes.axhline(result["settings"]["target"], color="grey", linewidth=0.8)
    axes.set(xlabel="training samples", ylabel="validation loss")
    axes.legend()


PICTURES = {"scaling": draw_scaling, "quality": draw_quality}


def draw_pictures(results: dict[str, dict], folder: Path) -> list[Path]:
    """A picture beside each result that is better looked at; the files that were written."""
    from matplotlib.figure import Figure

    written = []
    for name, draw in PICTURES.items():
        if name in results:
            figure = Figure(figsize=(7, 4), layout="constrained")
            draw(results[name], figure.subplots())
            figure.savefig(folder / f"{name}.png", dpi=110)
            written.append(folder / f"{name}.png")
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    parser.add_argument("--readme", type=Path, help="rewrite the section between the markers of this file")
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.results.glob("*.json"))}
    if not results:
        print(f"{arguments.results}: holds no results (*.json): run python -m benchmarks first", file=sys.stderr)
        return 2
    draw_pictures(results, arguments.results)
    text = section(results)
    print(text)
    if arguments.readme is not None:
        before, found, rest = arguments.readme.read_text().partition(BEGIN)
        if not found or END not in rest:
            print(f"{arguments.readme}: has no {BEGIN} ... {END}", file=sys.stderr)
            return 2
        arguments.readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
