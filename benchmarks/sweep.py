"""How do both stacks fare over model sizes, batch sizes and Muon settings? One sorted table; what does not fit is a row that says so.

    python -m benchmarks.sweep [--json FILE] [--model-kinds b2c32 b3c96 b12c192] [--batch-sizes 4 16] [--muon-settings ...] ...

Every model size with every batch size under AdamW, and every Muon setting with `--muon-model-kind` and the last batch size. A setting runs
in a process of its own, both stacks in turns, so that one which runs out of memory, crashes or takes too long loses its own row only. It
is compiled first: a program that by its own memory analysis needs more than `--memory-gib` is not run. A Muon setting is written as on
the command line, with `=` and commas: `muon_target=attn,muon_polar_steps=3`; an empty one ("") is Muon as it comes.

Before that both stacks are compared in exact mode, AdamW and each Muon setting, with the smallest model and a batch of as many rows as
there are devices (at least 8): the arithmetic is the same at every size.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import measure
from .step import add_arguments, options_of

MUON_SETTINGS = ("", "muon_target=attn", "muon_row_split_size=32", "muon_polar_steps=3")
SMALLEST = "b2c32"
MARK = "ROW "


def parse_setting(text: str) -> dict[str, Any]:
    """Options of "name=value,name=value"; values that are numbers or true and false are read as such."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    return {name.strip(): parse_value(value.strip()) for name, _, value in pairs}


def parse_value(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def settings_of(options: dict, kinds: list[str], batches: list[int], muon_settings: list[str], muon_kind: str) -> list[dict[str, Any]]:
    """The options of every row."""
    sizes = [options | {"optimizer": "adamw", "model_kind": kind, "batch_size": batch} for kind in kinds for batch in batches]
    muon = options | {"optimizer": "muon", "model_kind": muon_kind, "batch_size": batches[-1]}
    return sizes + [muon | parse_setting(text) for text in muon_settings]


def measure_one(options: dict, datadir: Path, devices: int, repeats: int, memory_gib: float | None) -> dict[str, Any]:
    """One row, in this process: seconds of every step of both stacks, the compiled programs' bytes; or why there is nothing."""
    import jax
    import legacy_pmap

    from kgo_shard.batches import find_files
    from kgo_shard.config import Config, ConfigError
    from kgo_shard.flops import muon_flops, training_flops

    from . import contenders
    from .step import time_steps

    try:
        config = Config(**options, **measure.parallel(devices))
        files = find_files(datadir / "train")
        made = [contenders.make_pmap(config, files, 2), contenders.make_shard_map(config, files, 2)]
        needs = {contender.name: measure.bytes_of(contender.lower().compile())["all"] for contender in made}
        if jax.default_backend() == "cpu":  # logical devices share the machine's memory
            needs = {name: devices * count for name, count in needs.items()}
            memory_gib = memory_gib or measure.machine_gib()
        if memory_gib is not None and max(needs.values()) > memory_gib * 2**30:
            return {"bytes": needs, "does not fit": f"needs {max(needs.values()) / 2**30:.2f} GiB, the limit is {memory_gib:g} GiB"}
        steps = time_steps(made, repeats, 0, lambda _: None)
    except (ConfigError, legacy_pmap.data.DataError) as error:  # of the devices or the model; a batch that no file has rows for
        return {"does not fit": str(error).replace(f"{datadir}/", "")}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"does not fit": "out of memory: " + str(error).splitlines()[0][:120]}
    return {
        "samples": {name: [step["whole"] for step in found["latency"]] for name, found in steps.items()},
        "bytes": needs,
        "flops": config.batch_size * training_flops(config.model),
        "muon flops": muon_flops(config) if config.optimizer == "muon" else 0,
    }


def run_apart(options: dict, words: list[str], timeout: float) -> dict[str, Any]:
    """The row of one setting from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sweep", "--one", json.dumps(options), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=measure.ROOT, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"does not fit": f"took longer than {timeout:g} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode < 0:
        return {"does not fit": f"ended by signal {-done.returncode}" + (" (out of memory?)" if done.returncode == -9 else "")}
    if done.returncode or not found:
        return {"failed": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1][-200:]}
    return json.loads(found[-1].removeprefix(MARK))


def sort_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that ran by rows a second of shard_map, the fastest first; then those that did not, as they were asked for."""
    for row in rows:
        if "samples" in row:
            medians = {name: measure.summary(times)["median"] for name, times in row["samples"].items()}
            row["rows a second"] = {name: row["options"]["batch_size"] / seconds for name, seconds in medians.items()}
            row["ratio"] = medians["shard_map"] / medians["pmap"]
    return sorted(rows, key=lambda row: -row["rows a second"]["shard_map"] if "samples" in row else 0)


def run(settings: list[dict], datadir: Path, devices: int, repeats: int, memory_gib: float | None, timeout: float, show) -> dict:
    """The whole result; this process leaves the accelerator alone until all rows are there. Raises measure.UnequalWork."""
    sizes, count = ("model_kind", "batch_size"), devices or measure.LOGICAL_DEVICES
    rules = {json.dumps({name: value for name, value in options.items() if name not in sizes}, sort_keys=True) for options in settings}
    for rule in sorted(rules):
        small = json.loads(rule) | {"model_kind": SMALLEST, "batch_size": count * -(-8 // count)}
        show(f"one step of both stacks, compared in exact mode: {small}")
        measure.refuse_unequal_work(small, datadir, count)
    words = ["--datadir", str(datadir.resolve()), "--devices", str(devices), "--repeats", str(repeats)]
    words += [] if memory_gib is None else ["--memory-gib", str(memory_gib)]
    rows = []
    for options in settings:
        rows.append({"options": options} | run_apart(options, words, timeout))
        ending = rows[-1].get("does not fit") or rows[-1].get("failed") or "done"
        show(f"{options['model_kind']}, batch {options['batch_size']}, {options['optimizer']}: {ending}")
    common = {name: value for name, value in settings[0].items() if all(options.get(name) == value for options in settings)}
    limits = {"devices": devices or "all", "repeats": repeats, "memory_gib": memory_gib, "timeout": timeout, "rows": datadir.name}
    return measure.result("rows a second of both stacks over model sizes, batch sizes and Muon settings", common | limits, rows=sort_rows(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, repeats=3)
    measure.add_devices(parser)
    parser.add_argument("--model-kinds", nargs="+", default=["b2c32", "b3c96", "b12c192"])
    parser.add_argument("--batch-sizes", type=measure.positive, nargs="+", default=[4, 16])
    parser.add_argument("--muon-settings", nargs="*", default=list(MUON_SETTINGS))
    parser.add_argument("--muon-model-kind", default="b3c96")
    parser.add_argument("--memory-gib", type=float, help="what a program may need; default: the machine's memory, where devices are logical")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a row")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        devices = measure.use_devices(arguments.devices)
        measure.keep_compiled()
        row = measure_one(json.loads(arguments.one), arguments.datadir, devices, arguments.repeats, arguments.memory_gib)
        print(MARK + json.dumps(row))
        return 0
    chosen = (arguments.model_kinds, arguments.batch_sizes, arguments.muon_settings, arguments.muon_model_kind)
    settings = settings_of(options_of(arguments), *chosen)
    limits = (arguments.devices, arguments.repeats, arguments.memory_gib, arguments.timeout)
    found = run(settings, arguments.datadir, *limits, measure.show)
    measure.write(arguments.json, found)
    from .tables import sweep_table

    print(sweep_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
