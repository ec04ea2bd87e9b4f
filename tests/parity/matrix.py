"""The long proof: 40 steps, old against new, every leaf of every stage, in exact mode, over every option of the original.

    python -m tests.parity.matrix --json tests/parity/results/matrix_jax_X.json [--only 8x4xclip] [--missing] [--states-only]

Four tables. GRID is devices x steps per call x clipping with AdamW in float32. PAIRS has every pair of values of (optimizer, layout,
precision, devices, steps per call), and takes the other options in turn, so that each value of each is met. BY_HAND has combinations
of Muon's options that PAIRS does not meet: heads in a list of blocks, rows cut in grouped blocks, several steps a call with the
update compiled apart. SPLIT has the new side's state split over the devices, the old side's whole on each, as ever. Results are added to the file setting by setting; the last full ones are committed in `results/`, and pytest runs a few of the settings with fewer
steps. Exit code 1 if a setting differs.
"""

import argparse
import datetime
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

from kgo_shard.__main__ import SAMPLE, SAMPLE_OPTIONS
from kgo_shard.diff.recording import exact_flags

DEVICES = ("1", "2", "4", "8", "16")
CALLS = ("1xclip", "4xnoclip", "4xclip", "1xnoclip")  # steps per call x clipping: the first two meet every value
# "one" is the old side under plain jit, without --data-parallel; "1" is pmap over one device.
GRID = ("onex1xclip", "onex4xnoclip", *(f"{devices}x{call}" for call in CALLS for devices in DEVICES))

BFLOAT16 = {f"{place}_dtype": "bf16" for place in ("compute", "activation", "param", "opt_state", "rope", "ffn_mul", "attention_logits")}
FACTORS = {
    "optimizer": {name: {"optimizer": name} for name in ("adamw", "muon", "sgd", "none")},
    "layout": {
        "list": {},
        "fused": {"fuse_projections": True},
        "stacked": {"stack_blocks": True, "remat_blocks": True},
        "scanned": {"scan_blocks": True, "fuse_projections": True},
    },
    "precision": {
        "float32": {"compute_dtype": "float32"},
        "computebf16": {"compute_dtype": "bfloat16"},
        "allbf16": BFLOAT16,
        "updatebf16": BFLOAT16 | {"opt_update_dtype": "bfloat16"},
    },
    "devices": {name: {} for name in ("one", "1", "2", "3", "4", "8", "16")},
    "calls": {"1": {"steps_per_jit": 1}, "4": {"steps_per_jit": 4}},
}
# What the settings of PAIRS take in turn, each option in an order of its own.
IN_TURN = {
    "attention_impl": ("manual", "xla"),
    "symmetry_type": ("xyt", "x", "xy", "x+y", "t", "none", "all"),
    "enable_history_matrices": (True, False, True),
    "ema_decay": (0.99, 0.0, 0.999),
    "grad_clip_norm": (1.0, 0.0, 0.0, 0.5),
    "log_grad_norm": (True, False, False, True, True),
    "lr_schedule": ("cosine", "constant", "cosine"),
    "warmup_samples": (256, 0),
    "loss_profile": ("full", "full", "policy_value", "full", "policy_only", "full", "value_only"),
    "muon_target": ("all", "attn", "ffn", "square", "none"),
    "muon_row_split_size": (0, 16, 24),
    "muon_polar_steps": (5, 3, 1, 2, 4),
    "muon_group_blocks": (True, False, True),
    "muon_lr_multiplier": (0.2, 0.1),
    "muon_momentum": (0.95, 0.9),
    "donate_train_buffers": (False, True),
    "remat_blocks": (False, True, False),
    "wd": (0.1, 0.0, 0.3),
    "lr": (2e-4, 1e-3),
    "init_std": (0.02, 0.05),
    "seed": (7, 1234, 0),
}


def all_pairs(factors: dict[str, dict]) -> list[tuple[str, ...]]:
    """Few combinations of one value a factor in which every pair of values of two factors occurs, chosen greedily."""

    def pairs(row):
        return set(itertools.combinations(enumerate(row), 2))

    rows = list(itertools.product(*factors.values()))
    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def turns(name: str) -> list[int]:
    """An order of the settings of PAIRS for each option: in one order for all, options of equal length would move together."""
    numbers = list(range(len(PAIRS)))
    random.Random(name).shuffle(numbers)
    return numbers


PAIRS = {"-".join(row): row for row in all_pairs(FACTORS)}
# Devices and options; the rest as in PAIRS.
CUT = {"optimizer": "muon", "muon_row_split_size": 16, "ema_decay": 0.99, "grad_clip_norm": 1.0, "log_grad_norm": True}
BY_HAND = {
    "muon-cut-grouped-list": ("4", CUT),
    "muon-cut-grouped-fused-allbf16": ("2", CUT | BFLOAT16 | {"fuse_projections": True, "donate_train_buffers": True}),
    "muon-apart-list": ("one", CUT | {"muon_split_jit": True, "steps_per_jit": 3, "donate_train_buffers": True}),
    "b3c96-muon": ("4", CUT | {"model_kind": "b3c96", "muon_row_split_size": 32, "muon_target": "attn", "steps_per_jit": 2}),
    "19x19-adamw": ("8", {"pos_len": 19, "batch_size": 16, "compute_dtype": "bfloat16", "log_grad_norm": True, "grad_clip_norm": 1.0}),
    "19x19-muon": ("2", CUT | {"pos_len": 19, "batch_size": 16, "steps_per_jit": 4, "muon_target": "square", "muon_polar_steps": 4}),
    "muon-apart-scanned": ("one", CUT | {"muon_split_jit": True, "steps_per_jit": 3, "scan_blocks": True, "remat_blocks": True}),
}
FLOAT32, WITH_NORM = {"compute_dtype": "float32"}, {"ema_decay": 0.99, "log_grad_norm": True}
MUON = FLOAT32 | WITH_NORM | {"optimizer": "muon"}
SPLIT = {
    "split-adamw-list-8": ("8", FLOAT32 | WITH_NORM | {"grad_clip_norm": 1.0}),
    "split-adamw-fused-3": ("3", FLOAT32 | WITH_NORM | {"fuse_projections": True, "steps_per_jit": 4}),
    "split-sgd-fused-16": ("16", FLOAT32 | {"optimizer": "sgd", "grad_clip_norm": 0.5, "fuse_projections": True}),
    "split-muon-rows-1": ("1", MUON | {"muon_row_split_size": 16}),
    "split-muon-attn-2": ("2", MUON | {"muon_target": "attn", "steps_per_jit": 2, "lr_schedule": "constant"}),
    "split-muon-ffn-4": ("4", MUON | {"muon_target": "ffn", "muon_group_blocks": False, "muon_polar_steps": 3, "muon_row_split_size": 16}),
    "split-muon-stacked-6": ("6", MUON | {"stack_blocks": True, "fuse_projections": True, "steps_per_jit": 2, "donate_train_buffers": True}),
    "split-muon-list-8": ("8", MUON | {"grad_clip_norm": 1.0}),
    "split-muon-square-16": ("16", MUON | {"scan_blocks": True, "muon_target": "square", "remat_blocks": True}),
    "split-adamw-computebf16-8": ("8", WITH_NORM | {"compute_dtype": "bfloat16", "grad_clip_norm": 1.0}),
    "split-muon-allbf16-4": ("4", MUON | BFLOAT16 | {"fuse_projections": True}),
}
SETTINGS = (*GRID, *PAIRS, *BY_HAND, *SPLIT)


def options_of(setting: str) -> dict:
    """The run's options of a setting such as "8x4xclip" or "muon-fused-allbf16-3-4"."""
    if setting in GRID:
        devices, steps_per_call, clipping = setting.split("x")
        options = {"steps_per_jit": int(steps_per_call), "grad_clip_norm": 1.0 if clipping == "clip" else 0.0, "log_grad_norm": True}
    elif setting in BY_HAND or setting in SPLIT:
        devices, chosen = (BY_HAND | SPLIT)[setting]
        options = {"batch_size": 48, "max_training_samples": 48 * 40} | chosen
        options |= {"shard_state": "data"} if setting in SPLIT else {}
    else:
        row, number = PAIRS[setting], list(PAIRS).index(setting)
        devices = row[list(FACTORS).index("devices")]
        # 48 rows divide by every number of devices, and by 8 images.
        options = {"batch_size": 48, "max_training_samples": 48 * 40}
        options |= {name: values[turns(name)[number] % len(values)] for name, values in IN_TURN.items()}
        for value, choices in zip(row, FACTORS.values(), strict=True):
            options |= choices[value]
        options["muon_split_jit"] = devices == "one"
        if devices == "one" and options.get("param_dtype") == "bf16":
            options["lr"] = 0.03  # see is_bounded: SGD's updates must be larger than bfloat16's rounding, or there is nothing to bound
    if devices != "one":
        options |= {"data_parallel": True, "data_parallel_devices": int(devices)}
    return SAMPLE_OPTIONS | options


def is_bounded(setting: str) -> bool:
    """Whether the three-way bound is demanded in place of equal bits: see its row in limits.py."""
    options = options_of(setting)
    return options.get("param_dtype") == "bf16" and (not options.get("data_parallel") or setting in SPLIT)


def compare_setting(setting: str, steps: int, states_only: bool = False):
    """The Comparison of one setting. Equal bits are demanded, but for `is_bounded`: the process must be in exact mode."""
    from kgo_shard.batches import find_files
    from kgo_shard.diff import run
    from kgo_shard.diff.trace import Tape

    options = options_of(setting)
    folder = SAMPLE.parent / f"selfplay{options['pos_len']}" / "train"
    tape = Tape(options, find_files(folder), steps)
    exact = not is_bounded(setting)
    return run.diff(tape, exact, states_only=states_only and exact)


def read_results(path: Path | None, environment: dict) -> dict:
    """The results in the file, or none yet. Ends the program where they are another JAX's."""
    if path is None or not path.exists():
        return {"environment": environment, "settings": {}}
    results = json.loads(path.read_text())
    if results["environment"]["JAX"] != environment["JAX"]:
        sys.exit(f"{path} has results of JAX {results['environment']['JAX']}, this is {environment['JAX']}: name another file")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="SETTING", help="such as 8x4xclip")
    parser.add_argument("--missing", action="store_true", help="leave out the settings that the file has")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--states-only", action="store_true", help="state and metrics after each call, not the stages inside: half the time")
    parser.add_argument("--cache", type=Path, default=Path(".cache/jax"), help="compilation cache")
    arguments = parser.parse_args()

    os.environ["XLA_FLAGS"] = " ".join(exact_flags())
    import jax

    jax.config.update("jax_num_cpu_devices", 16)
    jax.config.update("jax_compilation_cache_dir", str(arguments.cache.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    from kgo_shard.diff import report

    environment = report.environment_facts()
    results = read_results(arguments.json, environment)
    chosen = [setting for setting in arguments.only if not (arguments.missing and setting in results["settings"])]
    failed = 0
    for setting in chosen:
        start = time.perf_counter()
        comparison = compare_setting(setting, arguments.steps, arguments.states_only)
        failed += not comparison.equal
        jax.clear_caches()  # dozens of unfused programs take more memory maps than Linux gives one process
        results["settings"][setting] = {
            "passed": comparison.equal,
            "demanded": "three-way bound" if is_bounded(setting) else "every bit",
            "steps": arguments.steps,
            "compared": "states" if arguments.states_only and not is_bounded(setting) else "all stages",
            "leaves": len(comparison.leaves),
            "verdict": comparison.verdict(),
            "date": datetime.date.today().isoformat(),
            "commit": environment["commit"],
            "XLA_FLAGS": environment["XLA_FLAGS"],
        }
        print(f"{setting:32} {time.perf_counter() - start:5.0f} s  {comparison.verdict()}", flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(chosen) - failed} of {len(chosen)} settings passed")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
