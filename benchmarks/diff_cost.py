"""What does a comparison cost? A full-state diff of N steps against running both sides for N steps without looking.

    python -m benchmarks.diff_cost [--json FILE] [--steps 6] [--repeats 3] [--model-kind b12c192] [--devices 8] [--datadir DATA]

Both sides first run the tape compared (exact mode, every leaf of the state in every bit: unequal work is not timed), which also
compiles. Then, alternately: both run it and nothing is read but the last state; both run it, every state is fetched after every call,
and all leaves are compared. Reported is the ratio of the medians of one process, with every sample. Logical CPU devices share the
cores: the ratio says nothing about an accelerator, where a step is shorter and fetching slower.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path

from kgo_shard.diff.recording import EXACT_FLAGS

DATA = Path(__file__).parents[1] / "tests" / "data" / "selfplay19"


def run_plainly(side, tape):
    """The steps alone; returns when the last state is on the host."""
    state, done = side.start(), 0
    for chunk in side.chunks(lambda: state):
        state, _ = side.step(state, chunk)
        done += len(chunk)
        if done >= tape.steps:
            side.to_host(state)
            return


def measure(tape, repeats: int, show) -> dict[str, list[float]]:
    """Seconds of every repeat, "plain" and "diff". RuntimeError where the two sides are not equal."""
    from kgo_shard.diff import compare, run, shard_side
    from kgo_shard.diff.trace import record_states

    sides = run.old_stack().make_side(tape), shard_side.make_side(tape)

    def diff():
        comparison = compare.compare(*(record_states(side, tape) for side in sides))
        if not comparison.equal:
            raise RuntimeError(f"the sides do unequal work, nothing is timed: {comparison.verdict()}")

    def plain():
        for side in sides:
            run_plainly(side, tape)

    diff()
    samples = {"plain": [], "diff": []}
    for _ in range(repeats):
        for name, work in (("plain", plain), ("diff", diff)):
            start = time.perf_counter()
            work()
            samples[name].append(time.perf_counter() - start)
            show(f"{name}: {samples[name][-1]:.2f} s")
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--model-kind", default="b12c192")
    parser.add_argument("--pos-len", type=int, default=19)
    parser.add_argument("--datadir", type=Path, default=DATA)
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = " ".join(EXACT_FLAGS)
    import jax
    from rich.console import Console

    from kgo_shard.batches import find_files
    from kgo_shard.diff import report, run
    from kgo_shard.diff.trace import Tape

    jax.config.update("jax_num_cpu_devices", arguments.devices)
    options = {"pos_len": arguments.pos_len, "model_kind": arguments.model_kind, "batch_size": 16, "ema_decay": 0.999, "enable_history_matrices": True}
    options |= {"data_parallel": True, "data_parallel_devices": arguments.devices}
    tape = Tape(options, find_files(arguments.datadir / "train"), arguments.steps)
    samples = measure(tape, arguments.repeats, lambda text: Console(stderr=True).print(text, highlight=False))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    results = {
        "question": "seconds of a full-state diff as a multiple of running both sides without comparing",
        "date": datetime.date.today().isoformat(),
        "environment": report.environment_facts() | run.tape_facts(tape),
        "samples": samples,
        "ratio": medians["diff"] / medians["plain"],
    }
    print(f"{arguments.steps} steps, {arguments.model_kind}: a diff takes {results['ratio']:.2f} times what both sides take without it")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
