"""What does full Muon cost, and what does a device hold, where the state is split over the devices (--shard-state data)?

    python -m benchmarks.split_state [--json FILE] [--model-kind b12c192] [--devices 8] [--batch-size 16] [--repeats 6] [--datadir DATA]

One step of pmap, of the replicated step and of the split one, with AdamW and with full Muon, in turns in one process; then the split
Muon step with 1 to 16 devices on the same global batch. Beside it what needs no clock: bytes of state on a device, what the compiled
steps say of their memory, and on paper the operations and bytes of a chip and step at full size. Logical CPU devices share the cores: work
that every device repeats costs as many times as there are devices, which on real chips it does not; there it takes the time that it takes.
"""

import argparse
import statistics
import sys
from pathlib import Path

from . import measure
from .input import state_bytes
from .step import add_arguments, options_of, time_compiling, time_steps

PAPER = {"model_kind": "b24c1024", "batch_size": 128, "optimizer": "muon", "compute_dtype": "bfloat16"}  # 16 rows on each of 8 chips


def make_configs(options: dict, devices: int) -> dict:
    """The step's name -> its options; pmap's are the replicated step's."""
    from kgo_shard.config import Config

    made = {}
    for optimizer in ("adamw", "muon"):
        config = Config(**options | {"optimizer": optimizer}, **measure.parallel(devices))
        made |= {f"pmap, {optimizer}": config, f"replicated, {optimizer}": config, f"split, {optimizer}": config.replace(shard_state="data")}
    return made


def make_program(name: str | int, config, files):
    from . import contenders

    return (contenders.make_pmap if str(name).startswith("pmap") else contenders.make_shard_map)(config, files, 2)._replace(name=name)


def time_latency(programs: list, repeats: int) -> dict[str, list[float]]:
    """Seconds of every single awaited step, in turns."""
    return {name: [one["whole"] for one in found["latency"]] for name, found in time_steps(programs, repeats, 0, measure.show).items()}


def ratios_of(samples: dict[str, list[float]]) -> dict[str, float]:
    """Of medians of one run: whole steps as multiples of pmap's, and what Muon adds to AdamW's step as a share of what it adds there."""
    median = {name: statistics.median(times) for name, times in samples.items()}
    added = {side: median[f"{side}, muon"] - median[f"{side}, adamw"] for side in ("pmap", "replicated", "split")}
    whole = {f"{side}, {rule}": median[f"{side}, {rule}"] / median[f"pmap, {rule}"] for side in ("replicated", "split") for rule in ("adamw", "muon")}
    return whole | {f"added by Muon, {side}": added[side] / added["pmap"] for side in ("replicated", "split")}


def on_paper(devices: int) -> dict[str, dict[str, float]]:
    """Operations and bytes of one chip and step at full size, from the formulas of kgo_shard.flops and the shapes of the state.

    A reduce-scatter or an all-gather sends (D - 1) / D of its operand, an all-reduce twice that; Muon's matrices travel twice, in bfloat16,
    each to one device: 2 * 2 / D bytes a number.
    """
    import math

    import jax

    from kgo_shard.config import Config
    from kgo_shard.flops import muon_flops, training_flops
    from kgo_shard.model import matrices, net_shapes
    from kgo_shard.optim import MUON, rule_labels

    config = Config(**PAPER)
    net = net_shapes(config.model, config.precision)
    sizes, cast, rules = (jax.tree.leaves(tree) for tree in (jax.tree.map(lambda p: math.prod(p.shape), net), matrices(net), rule_labels(net, config)))
    params, in_compute = sum(sizes), sum(size for size, is_matrix in zip(sizes, cast, strict=True) if is_matrix)
    muon = sum(size for size, rule in zip(sizes, rules, strict=True) if rule in MUON)
    others, ring = (devices - 1) / devices, {"model": config.batch_size // devices * training_flops(config.model)}
    return {
        "replicated": ring | {"muon": muon_flops(config), "sent": 2 * others * 4 * params, "state": 4 * (2 * params - muon + params)},
        "split": ring | {
            "muon": muon_flops(config) / devices,
            "sent": others * (4 * params + 2 * in_compute + 4 * (params - in_compute) + 2 * 2 * muon / devices),
            "state": 4 * (2 * params - muon + params) / devices,
        },
    }  # fmt: skip


def run(options: dict, datadir: Path, devices: int, repeats: int, counts: list[int]) -> dict:
    """The whole result. Raises measure.UnequalWork."""
    from kgo_shard.batches import find_files
    from kgo_shard.config import Config

    for optimizer in ("adamw", "muon"):
        measure.show(f"one step of pmap and of the split state, compared in exact mode: {optimizer}")
        measure.refuse_unequal_work(options | {"optimizer": optimizer, "shard_state": "data"}, datadir, devices)
    files, configs = find_files(datadir / "train"), make_configs(options, devices)
    held = {name: sum(state_bytes(config).values()) for name, config in configs.items() if not name.startswith("pmap")}
    programs, needed = [make_program(name, config, files) for name, config in configs.items()], {}
    for program in programs:
        measure.show(f"compile {program.name}")
        needed[program.name] = time_compiling(program)["bytes"]
    samples = time_latency(programs, repeats)
    del programs
    of_counts = {count: Config(**options | {"optimizer": "muon", "shard_state": "data"}, **measure.parallel(count)) for count in counts}
    grown = time_latency([make_program(count, config, files) for count, config in of_counts.items()], max(2, repeats // 2))
    return measure.result(
        "what full Muon adds to a step, and what a device holds, with the state replicated and split",
        options | {"optimizer": "adamw and muon", "devices": devices, "repeats": repeats, "rows": str(datadir.name)},
        samples=samples,
        ratios=ratios_of(samples),
        growth={"samples": grown, "largest to one device": statistics.median(grown[counts[-1]]) / statistics.median(grown[counts[0]])},
        bytes_held=held,
        bytes_needed=needed,
        on_paper={"settings": PAPER, "devices": 8, "chip": on_paper(8)},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, repeats=6)
    measure.add_devices(parser)
    parser.add_argument("--counts", type=measure.positive, nargs="+", default=[1, 2, 4, 8, 16], help="devices of the split Muon step on one global batch")
    arguments = parser.parse_args()
    there = measure.start_devices(max(arguments.devices, *arguments.counts))
    devices = arguments.devices or min(measure.LOGICAL_DEVICES, there)
    counts = sorted(count for count in arguments.counts if count <= there)
    found = run(options_of(arguments), arguments.datadir, devices, arguments.repeats, counts)
    measure.write(arguments.json, found)
    for name, ratio in found["ratios"].items():
        print(f"{name:26} {ratio:.2f} x pmap's")
    print(f"from {counts[0]} to {counts[-1]} devices the split Muon step grows {found['growth']['largest to one device']:.2f} times")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
