"""The long proof: 40 steps, old against new, every leaf of every stage, over devices x steps per call x clipping, in exact mode.

    python -m tests.parity.matrix --json tests/parity/results/matrix_jax_X.json [--only 8x4xclip] [--steps 40]

The last full results are committed in `results/`; pytest runs a few of the settings with fewer steps. Exit code 1 if a setting differs.
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path

from kgo_shard.__main__ import EXACT_FLAGS, SAMPLE, SAMPLE_OPTIONS

DEVICES = ("1", "2", "4", "8", "16")
CALLS = ("1xclip", "4xnoclip", "4xclip", "1xnoclip")  # steps per call x clipping: the first two meet every value
# "one" is the old side under plain jit, without --data-parallel; "1" is pmap over one device.
SETTINGS = ("onex1xclip", "onex4xnoclip", *(f"{devices}x{call}" for call in CALLS for devices in DEVICES))


def options_of(setting: str) -> dict:
    """The run's options of a setting like "8x4xclip"."""
    devices, steps_per_call, clipping = setting.split("x")
    parallel = {} if devices == "one" else {"data_parallel": True, "data_parallel_devices": int(devices)}
    clip_norm = 1.0 if clipping == "clip" else 0.0
    return SAMPLE_OPTIONS | {"log_grad_norm": True, "steps_per_jit": int(steps_per_call), "grad_clip_norm": clip_norm} | parallel


def compare_setting(setting: str, steps: int):
    """The Comparison of one setting. Equal bits are demanded: the process must be in exact mode."""
    from kgo_shard.batches import find_files
    from kgo_shard.diff import run
    from kgo_shard.diff.trace import Tape

    return run.diff(Tape(options_of(setting), find_files(SAMPLE / "train"), steps), exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="SETTING", help="such as 8x4xclip")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cache", type=Path, default=Path(".cache/jax"), help="compilation cache")
    arguments = parser.parse_args()

    import os

    os.environ["XLA_FLAGS"] = " ".join(EXACT_FLAGS)
    import jax

    jax.config.update("jax_num_cpu_devices", 16)
    jax.config.update("jax_compilation_cache_dir", str(arguments.cache.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    from kgo_shard.diff import report

    results = {"date": datetime.date.today().isoformat(), "steps": arguments.steps, "environment": report.environment_facts(), "settings": {}}
    for setting in arguments.only:
        start = time.perf_counter()
        comparison = compare_setting(setting, arguments.steps)
        results["settings"][setting] = {"equal": comparison.equal, "leaves": len(comparison.leaves), "verdict": comparison.verdict()}
        print(f"{setting:12} {time.perf_counter() - start:5.0f} s  {comparison.verdict()}", flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    equal = sum(entry["equal"] for entry in results["settings"].values())
    print(f"{equal} of {len(results['settings'])} settings equal in every bit")
    return 0 if equal == len(results["settings"]) else 1


if __name__ == "__main__":
    sys.exit(main())
