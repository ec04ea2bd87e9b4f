"""What do bfloat16 parameters lose, and do float32 master copies mend it? The original's all-bfloat16 profile on real rows.

    python -m benchmarks.masters [--json FILE] [--samples 16384] [--seeds 3] [--lr 2e-4] [--optimizer muon] ...

Three runs for each seed, same start, same batches, the state of each split over the devices: parameters in float32; all seven dtypes bfloat16, as the original's single-chip profile
has them; the same with --master-dtype float32. Two figures of each: the share of stored parameters that a step leaves exactly as they were
(a bfloat16 number has 8 bits: an update below half of the last one is rounded away), averaged over the steps looked at, and the validation
loss after a fixed number of samples. `mended` is the share of the loss's excess over the float32 run that the master copies take away.
"""

import argparse
import statistics
import sys
from pathlib import Path

from . import measure
from .quality import endless, make_side
from .step import add_arguments, options_of

LOW = dict.fromkeys(
    ("param_dtype", "opt_state_dtype", "opt_update_dtype", "activation_dtype", "rope_dtype", "ffn_mul_dtype", "attention_logits_dtype"), "bfloat16"
)
RUNS = {"float32": {}, "bfloat16": LOW, "bfloat16, masters": LOW | {"master_dtype": "float32"}}


def unmoved(before: dict, after: dict) -> float:
    """The share of parameters whose stored bits are those of before."""
    import numpy as np

    equal = [np.ravel(before[name] == after[name]) for name in before if name.startswith("params/")]
    return float(np.mean(np.concatenate(equal)))


def train(side, files, seed: int, steps: int, look_every: int) -> dict[str, float]:
    """The validation loss after so many steps, and the share of parameters that a step did not move."""
    from kgo_shard.state import to_host

    state, stream, shares = side.start(seed), endless(side, files, seed), []
    for step in range(steps):
        before = to_host(state) if step % look_every == 0 else None
        state, _ = side.step(state, [next(stream)])
        if before is not None:
            shares.append(unmoved(before, to_host(state)))
    return {"loss": statistics.mean(side.evaluate(state, batch)["loss"] for batch in side.validation), "unmoved": shares}


def run(options: dict, datadir: Path, devices: int, seeds: int, samples: int, show) -> dict:
    """The whole result."""
    import kgo_shard
    from kgo_shard.batches import find_files, read_packed_batches
    from kgo_shard.config import Config

    files, validation = find_files(datadir / "train"), find_files(datadir / "val")
    steps = samples // options["batch_size"]
    sides = {
        name: make_side(name, kgo_shard, read_packed_batches, Config(**options | extra, **measure.parallel(devices), shard_state="data"), validation)
        for name, extra in RUNS.items()
    }
    found: dict[str, list[dict]] = {name: [] for name in sides}
    for seed in range(seeds):
        for name, side in sides.items():
            found[name].append(train(side, files, seed, steps, max(1, steps // 16)))
            show(f"seed {seed}, {name}: loss {found[name][-1]['loss']:.4f}, unmoved {statistics.mean(found[name][-1]['unmoved']):.1%}")
    losses = {name: statistics.mean(one["loss"] for one in all_seeds) for name, all_seeds in found.items()}
    excess = losses["bfloat16"] - losses["float32"]
    return measure.result(
        "what bfloat16 parameters lose, and what float32 master copies mend",
        options | {"devices": devices, "seeds": seeds, "samples": samples, "rows": datadir.name},
        samples=found,
        losses=losses,
        unmoved={name: statistics.mean(statistics.mean(one["unmoved"]) for one in all_seeds) for name, all_seeds in found.items()},
        mended=(losses["bfloat16"] - losses["bfloat16, masters"]) / excess if excess else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    measure.add_devices(parser)
    parser.set_defaults(model_kind="b2c32", pos_len=9, batch_size=32, compute_dtype="bfloat16", optimizer="muon", datadir=measure.DATA.with_name("selfplay9"))
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seeds", type=measure.positive, default=3)
    parser.add_argument("--samples", type=measure.positive, default=16384, help="rows trained on before the validation")
    arguments = parser.parse_args()
    if arguments.samples < arguments.batch_size:
        parser.error(f"--samples {arguments.samples} are no step of --batch-size {arguments.batch_size}")
    devices = measure.use_devices(arguments.devices)
    measure.keep_compiled()
    options = options_of(arguments) | {"lr": arguments.lr, "warmup_samples": 512, "lr_schedule": "constant"}
    found = run(options, arguments.datadir, devices, arguments.seeds, arguments.samples, measure.show)
    measure.write(arguments.json, found)
    for name, loss in found["losses"].items():
        print(f"{name:18} validation loss {loss:.4f}, a step leaves {found['unmoved'][name]:.1%} of the parameters as they were")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
