"""How long does a training step take, old and new? Four programs, interleaved, in one process.

    python -m benchmarks.step [--json FILE] [--optimizer adamw] [--repeats 10] [--window 5] [--devices 8] [--model-kind b12c192] ...

First both stacks must agree in every bit of one step, in exact mode; `jit`, which adds up otherwise, is judged by the three-way bound, and
left out where it breaks it. Then each program is lowered, compiled and run once, timed apart;
then, one after the other in turns of a random order, every repeat of
- latency: one step, synchronised: from the host's batch until every output is ready and the metrics are read; in it `place` (stack,
  transfer), `dispatch` (until the call returns) and `wait` (until everything is ready);
- rate: `window` steps in a row, of which only the last is awaited: seconds a step.
Host pieces are timed apart: `read` (a batch from the loader: files, and what it augments on the host). Logical CPU devices share the
cores: `one device` on the same batch is what they can reach at best, and no speed-up follows for real devices.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from . import measure


def time_compiling(contender) -> dict[str, float]:
    """Seconds of lowering, compiling and the first run; the run is of the function that is timed later."""
    import jax

    started = time.perf_counter()
    lowered = contender.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    state = contender.start()
    jax.block_until_ready(state)
    ran_at = time.perf_counter()
    jax.block_until_ready(contender.call(state, contender.place(contender.batches[0])))
    return {
        "lowering": lowered_at - started,
        "compiling": compiled_at - lowered_at,
        "first run": time.perf_counter() - ran_at,
        "bytes": measure.bytes_of(compiled),
    }


class Runner:
    """One contender's state as the steps go by, and what it took."""

    def __init__(self, contender):
        self.contender, self.state, self.taken = contender, contender.start(), 0

    def next_batch(self):
        self.taken += 1
        return self.contender.batches[self.taken % len(self.contender.batches)]

    def latency(self) -> dict[str, float]:
        import jax

        batch, contender = self.next_batch(), self.contender
        started = time.perf_counter()
        placed = contender.place(batch)
        placed_at = time.perf_counter()
        self.state, metrics = contender.call(self.state, placed)
        dispatched_at = time.perf_counter()
        jax.block_until_ready((self.state, metrics))
        ready_at = time.perf_counter()
        contender.fetch(metrics)
        done = time.perf_counter()
        return {
            "whole": done - started, "place": placed_at - started, "dispatch": dispatched_at - placed_at, "wait": ready_at - dispatched_at,
            "fetch": done - ready_at,
        }  # fmt: skip

    def rate(self, window: int) -> float:
        import jax

        started = time.perf_counter()
        for _ in range(window):
            self.state, metrics = self.contender.call(self.state, self.contender.place(self.next_batch()))
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - started) / window


def time_steps(contenders, repeats: int, window: int, show) -> dict[str, dict]:
    """Samples of each contender: the pieces of every single step, and seconds a step of every window (no windows where it is 0)."""
    runners = [Runner(contender) for contender in contenders]
    samples = {runner.contender.name: {"latency": [], "rate": []} for runner in runners}
    for runner in runners:
        runner.latency()  # whatever a first call still has to do
    turns = random.Random(0)
    with measure.compiling_nothing():
        for mode, times in (("latency", repeats), ("rate", max(2, repeats // 3) if window else 0)):
            for repeat in range(times):
                # Shuffled: whoever comes after a program like itself finds the memory that it needs, and its call returns earlier.
                for runner in turns.sample(runners, len(runners)):
                    samples[runner.contender.name][mode].append(runner.latency() if mode == "latency" else runner.rate(window))
                show(f"{mode} {repeat + 1} of {times}")
    return samples


def drop_unequal_automatic(contenders: list, config, files, show) -> dict[str, str]:
    """Take `jit` off the list where its step is not within the bound, so that nobody times it; its name and what is unequal."""
    [automatic] = (contender for contender in contenders if contender.name == "jit")
    try:
        measure.refuse_unequal_automatic(config, files, automatic)
    except measure.UnequalWork as error:
        contenders.remove(automatic)
        show(f"not timed: {error}")
        return {"jit": str(error)}
    return {}


def time_reading(config, files, num_batches: int, repeats: int) -> dict[str, list[float]]:
    """Seconds a batch from the loaders, "original" and "ours", the files read anew each time."""
    import legacy_pmap

    from kgo_shard.batches import read_packed_batches

    from .contenders import legacy_config

    old = legacy_config(config)
    samples = {"original": [], "ours": []}
    for _ in range(repeats):
        for name, stream in (("original", legacy_pmap.read_batches(files, old, 0)), ("ours", read_packed_batches(files, config, 0))):
            started = time.perf_counter()
            for _ in range(num_batches):
                next(stream)
            samples[name].append((time.perf_counter() - started) / num_batches)
    return samples


def run(options: dict, datadir: Path, devices: int, repeats: int, window: int, show) -> dict:
    """The whole result. Raises measure.UnequalWork."""
    from kgo_shard.batches import find_files
    from kgo_shard.config import Config

    from . import contenders as programs

    show("one step of both stacks, compared in exact mode")
    measure.refuse_unequal_work(options, datadir, devices)
    config, files = Config(**options, **measure.parallel(devices)), find_files(datadir / "train")
    made = [
        programs.make_pmap(config, files, 2),
        programs.make_shard_map(config, files, 2),
        programs.make_automatic(config, files, 2),
        programs.make_one_device(config, files, 2),
        programs.make_pmap(config, files, 2, unreplicate=True),
    ]
    compiling = {}
    for contender in made[:4]:  # the fifth is the first, read otherwise
        show(f"compile {contender.name}")
        compiling[contender.name] = time_compiling(contender)
    show("one step of jit, by the three-way bound")
    refused = drop_unequal_automatic(made, config, files, show)
    samples = time_steps(made, repeats, window, show)
    medians = {name: measure.summary([step["whole"] for step in found["latency"]])["median"] for name, found in samples.items()}
    rates = {name: measure.summary(found["rate"])["median"] for name, found in samples.items()}
    return measure.result(
        "seconds of a training step: latency when every step is awaited, rate when a window is",
        options | {"devices": devices, "repeats": repeats, "window": window, "rows": str(datadir.name)},
        compiling=compiling,
        samples=samples,
        refused=refused,
        reading=time_reading(config, files, 2, repeats),
        ratios={
            "latency": {name: value / medians["pmap"] for name, value in medians.items()},
            "rate": {name: value / rates["pmap"] for name, value in rates.items()},
        },
    )


def add_arguments(parser: argparse.ArgumentParser, repeats: int = 10):
    parser.add_argument("--json", type=measure.writable, help="write the result there")
    parser.add_argument("--model-kind", default="b12c192")
    parser.add_argument("--pos-len", type=int, default=19)
    parser.add_argument("--batch-size", type=measure.positive, default=16)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--compute-dtype", default="float32")
    parser.add_argument("--repeats", type=measure.positive, default=repeats)
    parser.add_argument("--datadir", type=Path, default=measure.DATA)


def options_of(arguments) -> dict:
    names = ("model_kind", "pos_len", "batch_size", "optimizer", "compute_dtype")
    return {name: getattr(arguments, name) for name in names} | {"enable_history_matrices": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    measure.add_devices(parser)
    parser.add_argument("--window", type=measure.positive, default=5)
    arguments = parser.parse_args()
    devices = measure.use_devices(arguments.devices)
    import jax

    jax.config.update("jax_enable_compilation_cache", False)  # compiling is timed
    found = run(options_of(arguments), arguments.datadir, devices, arguments.repeats, arguments.window, measure.show)
    measure.write(arguments.json, found)
    for name, ratio in found["ratios"]["latency"].items():
        print(f"{name:12} latency {ratio:.2f} x pmap's, rate {found['ratios']['rate'][name]:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
