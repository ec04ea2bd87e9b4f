"""Does the new side learn as well? Samples and seconds to a fixed validation loss, same data order, paired seeds, both stacks.

    python -m benchmarks.quality [--json FILE] [--target 44] [--seeds 5] [--margin 0.05] [--most-samples 8192] ...

For each seed both sides start from the same numbers and train on the same batches in the same order, in default mode; validation is the
trainers' own, after every `--every` samples, and not in the seconds. Where the loss crosses `--target` lies between two validations:
interpolated linearly. The verdict is about the mean over seeds of (ours / the original's - 1), by its 95 % t interval:

    not inferior   the whole interval lies below `--margin`
    inferior       the whole interval lies above it
    not shown      all else: a wide interval shows nothing; neither do fewer than two seeds, or a seed at which one side never got there

The margin is chosen before the data are seen: 0.05, because a twentieth more samples is less than what anybody would give up a migration
for, while a mistake in the learning rate or the gradient costs tens of per cent (a test halves the rate, and the new side is inferior).
The margin of the seconds is the same. A side that never reaches the target counts with all the samples it was given, which is too few.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import measure
from .step import add_arguments, options_of

CONFIDENCE = 0.95


class Side(NamedTuple):
    """One stack, as its trainer drives it."""

    name: str
    start: Callable  # seed -> state
    step: Callable  # (state, [batch]) -> (state, metrics)
    evaluate: Callable  # (state, batch) -> metrics
    batches: Callable  # (files, seed) -> iterator of batches
    validation: list  # batches


def make_side(name: str, stack, read_batches, config, validation) -> Side:
    """`read_batches(files, config, seed)`; the compiled functions serve all seeds."""
    quiet = dataclasses.replace(config, symmetry_type="none")
    return Side(
        name,
        start=lambda seed: stack.init_state(dataclasses.replace(config, seed=seed)),
        step=stack.make_train_step(config),
        evaluate=stack.make_eval_step(config),
        batches=lambda files, seed: read_batches(files, config, seed),
        validation=list(read_batches(validation, quiet, 0)),
    )


def endless(side: Side, files, seed: int) -> Iterator:
    """The batches of one epoch after another; the order of each depends on the seed alone."""
    from kgo_shard.batches import epoch_files

    for epoch in itertools.count():
        yield from side.batches(epoch_files(files, seed + epoch), seed + epoch)


def train_to(side: Side, files, seed: int, target: float, every: int, most: int, batch_size: int) -> dict[str, Any]:
    """The curve (samples, seconds, validation loss) until the loss is at most `target` or `most` samples are seen; and the crossing."""
    import jax

    def validate():
        return statistics.mean(side.evaluate(state, batch)["loss"] for batch in side.validation)

    state, stream, samples, seconds = side.start(seed), endless(side, files, seed), 0, 0.0
    curve = [(0, 0.0, validate())]
    while curve[-1][2] > target and samples < most:
        started = time.perf_counter()
        for _ in range(every // batch_size):
            state, _ = side.step(state, [next(stream)])
        jax.block_until_ready(jax.tree.leaves(state))
        seconds, samples = seconds + time.perf_counter() - started, samples + every // batch_size * batch_size
        curve.append((samples, seconds, validate()))
    return {"curve": curve} | crossing(curve, target)


def crossing(curve: list[tuple[int, float, float]], target: float) -> dict[str, Any]:
    """Samples and seconds at which the loss crosses the target, between the last two points; `reached` false: those of the last point."""
    samples, seconds, loss = curve[-1]
    if loss > target or len(curve) == 1:
        return {"reached": loss <= target, "samples": samples, "seconds": seconds}
    before = curve[-2]
    share = (before[2] - target) / (before[2] - loss)
    return {"reached": True, "samples": before[0] + share * (samples - before[0]), "seconds": before[1] + share * (seconds - before[1])}


def interval(values: list[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The t interval of the mean of at least two values: mean -+ t(n - 1) s / sqrt(n) (Student, 1908)."""
    from scipy import stats  # JAX needs it, too

    half = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return float(statistics.mean(values) - half), float(statistics.mean(values) + half)


def judge(old: list[dict], new: list[dict], quantity: str, margin: float) -> dict[str, Any]:
    """The verdict on paired seeds: `quantity` is "samples" or "seconds" of each seed's crossing."""
    differences = [ours[quantity] / theirs[quantity] - 1 for theirs, ours in zip(old, new, strict=True) if theirs[quantity] > 0]
    found = {"differences": differences, "margin": margin, "interval": None, "reason": ""}
    if not all(seed["reached"] for seed in old):
        return found | {"verdict": "not shown", "reason": "the original did not reach the loss with every seed"}
    if len(differences) < 2 or len(differences) < len(old):
        return found | {"verdict": "not shown", "reason": "an interval needs two seeds that had something to learn"}
    low, high = interval(differences)
    if low > margin:
        verdict, reason = "inferior", "the whole interval lies above the margin"
    elif not all(seed["reached"] for seed in new):
        verdict, reason = "not shown", "the new side did not reach the loss with every seed"
    elif high < margin:
        verdict, reason = "not inferior", "the whole interval lies below the margin"
    else:
        verdict, reason = "not shown", "the interval holds the margin"
    return found | {"interval": [low, high], "verdict": verdict, "reason": reason}


def run(
    options: dict, datadir: Path, devices: int, seeds: int, target: float, margin: float, every: int, most: int, show, new_options: dict | None = None
) -> dict:
    """The whole result. Raises measure.UnequalWork. `new_options` change the new side alone: how a test makes it worse."""
    import legacy_pmap

    import kgo_shard
    from kgo_shard.batches import find_files, read_packed_batches
    from kgo_shard.config import Config

    from .contenders import legacy_config

    if every < options["batch_size"]:
        raise SystemExit(f"validation every {every} samples is oftener than every batch of {options['batch_size']}")
    show("one step of both stacks, compared in exact mode")
    measure.refuse_unequal_work(options, datadir, devices)
    config = Config(**options, **measure.parallel(devices))
    files, validation = find_files(datadir / "train"), find_files(datadir / "val")
    sides = [
        make_side("pmap", legacy_pmap, legacy_pmap.read_batches, legacy_config(config), validation),
        make_side("shard_map", kgo_shard, read_packed_batches, config.replace(**new_options or {}), validation),
    ]
    for side in sides:  # compiles: not in the seconds
        state, _ = side.step(side.start(0), [next(endless(side, files, 0))])
        side.evaluate(state, side.validation[0])
    samples: dict[str, list[dict]] = {side.name: [] for side in sides}
    for seed in range(seeds):
        for side in sides if seed % 2 == 0 else sides[::-1]:
            samples[side.name].append(train_to(side, files, seed, target, every, most, config.batch_size))
            last = samples[side.name][-1]
            show(f"seed {seed}, {side.name}: loss {last['curve'][-1][2]:.3f} after {last['samples']:.0f} samples, {last['seconds']:.2f} s")
    return measure.result(
        "samples and seconds to a fixed validation loss, paired seeds",
        options
        | {"devices": devices, "seeds": seeds, "target": target, "margin": margin, "every": every, "most_samples": most, "rows": datadir.name},
        samples=samples,
        verdicts={quantity: judge(samples["pmap"], samples["shard_map"], quantity, margin) for quantity in ("samples", "seconds")},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    measure.add_devices(parser)
    parser.set_defaults(model_kind="b2c32", pos_len=9, batch_size=32, datadir=measure.DATA.with_name("selfplay9"))
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--target", type=float, default=44.0, help="validation loss")
    parser.add_argument("--seeds", type=measure.positive, default=5)
    parser.add_argument("--margin", type=float, default=0.05, help="how much more the new side may need, as a share")
    parser.add_argument("--every", type=measure.positive, default=512, help="samples between validations")
    parser.add_argument("--most-samples", type=measure.positive, default=8192)
    arguments = parser.parse_args()
    devices = measure.use_devices(arguments.devices)
    measure.keep_compiled()
    options = options_of(arguments) | {"lr": arguments.lr, "warmup_samples": 512, "lr_schedule": "constant"}
    chosen = (arguments.seeds, arguments.target, arguments.margin, arguments.every, arguments.most_samples)
    found = run(options, arguments.datadir, devices, *chosen, measure.show)
    measure.write(arguments.json, found)
    from .tables import quality_lines

    print(*quality_lines(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
