"""Every question, one after the other, into `benchmarks/results`; then the tables, the pictures and the README's section are drawn.

    python -m benchmarks [--only step-adamw ...] [--results FOLDER] [--readme FILE] [options that all of the named scripts have]

About 40 minutes on two quiet cores; on an accelerator the same command takes all devices there are. Each question runs in a process of
its own; a question that fails is named and the others still run.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from . import measure

QUESTIONS = {
    "step-adamw": ("step", ["--optimizer", "adamw", "--repeats", "15", "--window", "3"]),
    "step-muon": ("step", ["--optimizer", "muon", "--repeats", "6", "--window", "2"]),
    "split_state": ("split_state", ["--repeats", "12"]),
    "masters": ("masters", []),
    "input": ("input", []),
    "scaling": ("scaling", []),
    "components": ("components", []),
    "quality": ("quality", []),
    "sweep": ("sweep", []),
    "save_stall": ("save_stall", []),
    "diff_cost": ("diff_cost", ["--steps", "3", "--repeats", "2"]),
}


# glibc gives blocks of some MB back to the system when they are freed, or keeps them, as it happens; new pages have to be cleared, and a
# small part of a step waits for that or does not (attention alone: 27 or 110 ms). Here it keeps them, in one arena, which can. A whole step
# needs blocks so large that they are always given back: it runs as users run it.
KEEP_MEMORY = {
    "components": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:glibc.malloc.arena_max=1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    parser.add_argument("--readme", type=Path, help="also rewrite the section between the markers of this file")
    arguments, others = parser.parse_known_args()
    try:
        arguments.results.mkdir(parents=True, exist_ok=True)
        if arguments.readme is not None:
            arguments.readme.read_text()
    except OSError as error:  # before the half hour, not after it
        parser.error(f"{error.filename}: {error.strerror}")
    failed = []
    for name in arguments.only:
        script, words = QUESTIONS[name]
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{script}", *words, *others, "--json", str(arguments.results / f"{name}.json")]
        environment = ({"GLIBC_TUNABLES": KEEP_MEMORY[name]} if name in KEEP_MEMORY else {}) | os.environ
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
    if failed:  # an older result of the question would be drawn as if it were this run's
        print(f"failed: {', '.join(failed)}: nothing is drawn; python -m benchmarks.draw draws what is in {arguments.results}")
        return 1
    command = [sys.executable, "-m", "benchmarks.draw", "--results", str(arguments.results)]
    command += [] if arguments.readme is None else ["--readme", str(arguments.readme)]
    if subprocess.run(command, check=False).returncode:
        return 1
    print(f"results in {arguments.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
