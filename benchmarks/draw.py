"""Tables and a picture of the results, and the README's section about performance: drawn from the JSON, no number copied by hand.

    python -m benchmarks.draw [--results FOLDER] [--readme FILE]
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from . import measure

BEGIN, END = "<!-- drawn by benchmarks.draw: begin -->", "<!-- drawn by benchmarks.draw: end -->"
PIECES = ("place", "dispatch", "wait", "fetch")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine_line(result: dict) -> str:
    facts, settings = result["environment"], result["settings"]
    return (
        f"{facts['processor']}, {facts['memory']}; JAX {facts['JAX']} ({facts['pmap']}), Python {facts['Python']}; commit "
        f"{facts['commit'][:10]}{' with changes' if 'changes' in facts['commit'] else ''}, {result['date']}; {settings['model_kind']}, pos_len {settings['pos_len']}, batch {settings['batch_size']}, {settings['optimizer']}, "
        f"{settings['compute_dtype']}, {settings['devices']} logical devices, rows of {settings['rows']}"
    )


def step_table(result: dict) -> str:
    """A row for each contender: medians as multiples of pmap's in the same run."""
    rows = []
    for name, samples in result["samples"].items():
        whole = measure.summary([step["whole"] for step in samples["latency"]])
        pmap = measure.summary([step["whole"] for step in result["samples"]["pmap"]["latency"]])
        pieces = [f"{statistics.median(step[piece] for step in samples['latency']) / pmap['median']:.3f}" for piece in PIECES]
        compiling = result["compiling"].get(name)
        base = result["compiling"]["pmap"]
        compiled = "" if compiling is None else " ".join(f"{compiling[part] / base[part]:.2f}" for part in ("lowering", "compiling", "first run"))
        rows.append([
            name, f"{whole['median'] / pmap['median']:.2f}", f"{whole['90 %'] / pmap['median']:.2f}", f"{whole['spread'] / pmap['median']:.2f}",
            f"{result['ratios']['rate'][name]:.2f}", *pieces, compiled,
        ])  # fmt: skip
    return table(["program", "latency", "90 %", "spread", "rate: time a step", *PIECES, "lowering, compiling, first run"], rows)


def input_table(result: dict) -> str:
    rows = [[name, f"{ratio:.2f}"] for name, ratio in result["ratios"].items()]
    return table(["input: ours as a multiple of the original's", "ratio"], rows)


def section(results: dict[str, dict]) -> str:
    """The README's section."""
    parts = []
    for name in ("step-adamw", "step-muon"):
        if name in results:
            parts += [f"**One training step** ({machine_line(results[name])}). Times are multiples of pmap's median in the same run.", step_table(results[name])]
    if "input" in results:
        sizes = results["input"]["bytes_a_row"]
        parts += [
            f"**Input** ({machine_line(results['input'])}): rows a second from compressed files; a row is {sizes['ours']:.0f} bytes to the device, "
            f"the original's {sizes['original']:.0f}.",
            input_table(results["input"]),
        ]
    if parts:
        parts.append(
            "Logical CPU devices share the cores: `one device` with the same batch is what the others can reach at best there, and nothing here is a "
            "speed-up of real devices."
        )
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    parser.add_argument("--readme", type=Path, help="rewrite the section between the markers of this file")
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.results.glob("*.json"))}
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
