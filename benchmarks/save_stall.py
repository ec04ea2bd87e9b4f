"""How long does the training loop stand still for a save, and how long does a second start take to its first step?

    python -m benchmarks.save_stall [--json FILE] [--saves 5] [--model-kind b12c192] [--datadir DATA]

The original's way is to pickle the whole state and wait; ours hands the state to a thread. One process, one state, alternately: the
blocking save; and ours, of which the loop feels the call itself and, if the one before is still being written, the wait for it (there is
a training step between two saves, as in a run). What ours costs the steps beside it on shared cores is in "beside": the seconds of a
step while a save is written, and without. Then two starts of the trainer in processes of their own in one run folder, on one device and
on all: seconds from the start of the process to its first log line, compiled anew and from the folder's cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import measure


def measure_saves(config, batch, saves: int, folder: Path, show) -> dict[str, list[float]]:
    """Seconds that the loop stands still, "blocking" and "ours"; of a step "alone" and "beside" a save; and until ours is complete."""
    import jax

    from kgo_shard.checkpoint import save_checkpoint, to_trees
    from kgo_shard.state import init_state
    from kgo_shard.step import make_train_step
    from kgo_shard.store import Store, read

    step, state, kept = make_train_step(config), init_state(config), Store(folder, keep=2)
    samples: dict[str, list[float]] = {name: [] for name in ("blocking", "ours", "alone", "beside", "written")}

    def timed(name, work):
        start = time.perf_counter()
        result = work()
        samples[name].append(time.perf_counter() - start)
        return result

    def train_step():
        after, _ = step(state, [batch])
        return jax.block_until_ready(after)

    state = train_step()
    for number in range(1, saves + 1):
        state = timed("alone", train_step)
        timed("blocking", lambda: save_checkpoint(folder / "checkpoint_jax.pkl", state, config))
        begun = time.perf_counter()
        timed("ours", lambda: kept.save(number, to_trees(state.learned), {"step": number}))
        state = timed("beside", train_step)
        kept.wait()
        samples["written"].append(time.perf_counter() - begun)
        show(f"save {number}: blocking {samples['blocking'][-1]:.3f} s, ours {samples['ours'][-1]:.5f} s")
    kept.close()
    read(folder / "checkpoints" / f"{saves:08d}")  # raises where it is not whole
    return samples


def measure_starts(words: list[str], devices: int, folder: Path) -> list[float]:
    """Seconds to the first log line of two starts on so many devices; the second finds what the first one compiled."""
    seconds = []
    parallel = [text for name, value in measure.parallel(devices).items() if value for text in measure.words_of(name, value)]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    for _ in range(2):
        start = time.perf_counter()
        command = [sys.executable, "-m", "kgo_shard", "train", *words, *parallel, "--traindir", str(folder), "--no-resume"]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        next(line for line in run.stdout if line.startswith("step="))
        seconds.append(time.perf_counter() - start)
        run.communicate()
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}")
    return seconds


def run(options: dict, datadir: Path, devices: int, saves: int, show) -> dict:
    from kgo_shard.batches import find_files, read_packed_batches
    from kgo_shard.config import Config

    words = [text for name, value in options.items() for text in measure.words_of(name, value)]
    words += ["--datadir", str(datadir), "--max-training-samples", str(options["batch_size"]), "--print-every", "1", "--max-val-batches", "1"]
    config = Config(**options)
    batch = next(read_packed_batches(find_files(datadir / "train"), config, 0))
    with tempfile.TemporaryDirectory() as folder:
        starts = {count: measure_starts([*words, "--no-final-save"], count, Path(folder) / f"starts{count}") for count in sorted({1, devices})}
        samples = measure_saves(config, batch, saves, Path(folder), show)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return measure.result(
        "the stall of the loop for a save against the original's blocking save; a second start against the first",
        options | {"devices": 1, "optimizer": config.optimizer, "rows": datadir.name, "saves": saves},
        samples=samples,
        starts=starts,
        ratios={"stall": medians["ours"] / medians["blocking"], "beside": medians["beside"] / medians["alone"]}
        | {"cost": (medians["ours"] + medians["beside"] - medians["alone"]) / medians["blocking"]}
        | {"start": {count: second / first for count, (first, second) in starts.items()}},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=measure.writable, help="write the results here")
    parser.add_argument("--saves", type=measure.positive, default=5)
    parser.add_argument("--model-kind", default="b12c192")
    parser.add_argument("--pos-len", type=int, default=19)
    parser.add_argument("--datadir", type=Path, default=measure.DATA)
    measure.add_devices(parser)
    arguments = parser.parse_args()
    devices = measure.use_devices(arguments.devices)
    options = {"pos_len": arguments.pos_len, "model_kind": arguments.model_kind, "batch_size": 8, "ema_decay": 0.999, "compute_dtype": "float32"}
    found = run(options, arguments.datadir, devices, arguments.saves, measure.show)
    measure.write(arguments.json, found)
    ratios = found["ratios"]
    print(
        f"{arguments.model_kind}: the loop stands still for {ratios['stall']:.4f} of a blocking save; a step beside a save takes "
        f"{ratios['beside']:.2f} times as long"
    )
    for count, ratio in ratios["start"].items():
        print(f"the second start takes {ratio:.2f} of the first on {count} devices")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
