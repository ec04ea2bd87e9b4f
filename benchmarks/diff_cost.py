"""What does a comparison cost? A full-state diff of N steps against running both sides for N steps without looking.

    python -m benchmarks.diff_cost [--json FILE] [--steps 6] [--repeats 3] [--model-kind b12c192] [--devices 8] [--datadir DATA]

Both sides first run the tape compared (exact mode, every leaf of the state in every bit: unequal work is not timed), which also
compiles. Then, alternately: both run it and nothing is read but the last state; both run it, every state is fetched after every call,
and all leaves are compared. Reported is the ratio of the medians of one process, with every sample. Logical CPU devices share the
cores: the ratio says nothing about an accelerator, where a step is shorter and fetching slower.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from kgo_shard.diff.recording import exact_flags

from . import measure


def run_plainly(side, tape):
    """The steps alone; returns when the last state is on the host."""
    state, done = side.start(), 0
    for chunk in side.chunks(lambda: state):
        state, _ = side.step(state, chunk)
        done += len(chunk)
        if done >= tape.steps:
            side.to_host(state)
            return


def time_diff(tape, repeats: int, show) -> dict[str, list[float]]:
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
    parser.add_argument("--json", type=measure.writable, help="write the results here")
    parser.add_argument("--steps", type=measure.positive, default=6)
    parser.add_argument("--repeats", type=measure.positive, default=3)
    measure.add_devices(parser)
    parser.add_argument("--model-kind", default="b12c192")
    parser.add_argument("--pos-len", type=int, default=19)
    parser.add_argument("--datadir", type=Path, default=measure.DATA)
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = " ".join(exact_flags())
    devices = measure.use_devices(arguments.devices)
    from kgo_shard.batches import find_files
    from kgo_shard.diff import run
    from kgo_shard.diff.trace import Tape

    options = {
        "pos_len": arguments.pos_len,
        "model_kind": arguments.model_kind,
        "batch_size": 16,
        "ema_decay": 0.999,
        "enable_history_matrices": True,
    }
    tape = Tape(options | measure.parallel(devices), find_files(arguments.datadir / "train"), arguments.steps)
    samples = time_diff(tape, arguments.repeats, measure.show)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    found = measure.result(
        "seconds of a full-state diff as a multiple of running both sides without comparing",
        options | {"devices": devices, "optimizer": "adamw", "compute_dtype": "bfloat16", "rows": arguments.datadir.name, "steps": arguments.steps},
        samples=samples,
        ratios={"diff": medians["diff"] / medians["plain"]},
    )
    found["environment"] |= run.tape_facts(tape)
    measure.write(arguments.json, found)
    print(f"{arguments.steps} steps, {arguments.model_kind}: a diff takes {found['ratios']['diff']:.2f} times what both sides take without it")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
