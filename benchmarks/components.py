"""Where does the time of a step go? Every part compiled apart and timed on the same devices, against a measured matrix-product peak.

    python -m benchmarks.components [--json FILE] [--repeats 7] [--peak-tflops X] [--devices N] [--optimizer adamw] ...

The parts are the network's own functions (kgo_shard/profile.py) on the inputs they have in a forward pass, each device with its own rows:
stem, one block and its norm, attention and feed-forward part, trunk, heads, forward pass, loss, gradient (forward and backward, of each
device's own rows), the mean over the devices, the optimizer's update; and the whole step.

FLOPs are the model's (kgo_shard/flops.py): what the mathematics needs in matrix products, whatever a program does; 0 for the rest. The
peak is the fastest product of two square matrices on all devices at once, in the same run, in float32 and in the compute dtype; on
logical CPU devices, which share the cores, it is the cores'.

Sums of parts stand beside their whole. They need not agree: each part writes its results to memory and is started apart, while in the
whole the compiler fuses and shares work across borders, and keeps what one part leaves in cache for the next; the whole has work of its
own, too (sums of metrics, the check for finite numbers), and runs inside a scan over the steps of a call.
"""

import argparse
import statistics
import sys
from pathlib import Path

from . import measure
from .step import add_arguments, options_of

SUMS = {  # whole -> how often each part is in it
    "block": {"norm": 2, "attention": 1, "ffn": 1},
    "forward": {"stem": 1, "block": "layers", "norm": 1, "heads": 1},
    "step": {"expand": 1, "gradient": 1, "mean": 1, "optimizer": 1},
}
FORMULAS = {
    "model": "model-only utilisation = batch x 3 x forward FLOPs of a row / (seconds of the step x peak FLOP/s of all devices)",
    "with Muon": "utilisation with Muon's work = (batch x 3 x forward FLOPs of a row + devices x polar FLOPs of a step) / (seconds x peak): "
    "the state is replicated, so every device does all of Muon's iterations",
}


def utilisation(flops: float, seconds: float, peak: float) -> float:
    """The share of `peak` FLOP/s that `flops` operations in `seconds` make."""
    return flops / seconds / peak


def sum_of_parts(parts: dict, seconds: dict[str, float], layers: int) -> float:
    return sum((layers if count == "layers" else count) * seconds[name] for name, count in parts.items())


def on_each_device(function, device_mesh, *inputs):
    """A call of `function` as each device runs it on its rows; what is replicated is taken as the device's own, so nothing is reduced."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from kgo_shard import mesh, reduce

    def by_rows(leaf):
        return isinstance(leaf.sharding, NamedSharding) and mesh.AXIS in leaf.sharding.spec

    split = jax.tree.map(by_rows, inputs)

    def body(*inputs):
        own = jax.tree.map(lambda x, varies: x if varies else reduce.to_local(x), inputs, split)
        return jax.tree.map(lambda x: x[None], function(*own))

    specs = jax.tree.map(lambda varies: PartitionSpec(mesh.AXIS) if varies else PartitionSpec(), split)
    run = jax.jit(jax.shard_map(body, mesh=device_mesh, in_specs=specs, out_specs=PartitionSpec(mesh.AXIS), check_vma=True))
    return lambda: run(*inputs)


def make_calls(config, files) -> dict:
    """name -> a call of this part on the run's devices, in the order of a step."""
    import jax

    from kgo_shard import augment, mesh, optim, profile, reduce, step
    from kgo_shard.model import make_tables
    from kgo_shard.state import Learned

    from . import contenders

    device_mesh = mesh.make_mesh(config)
    whole = contenders.make_shard_map(config, files, 1)
    placed, learned = whole.place(whole.batches[0]), whole.start()
    rows, _ = placed

    def expand(rows):
        return augment.expand(step.first_batch(rows), config.pos_len)

    expanded = jax.jit(mesh.shard(expand, device_mesh, inputs=("batch",), outputs="local"))
    parts = profile.make_parts(learned.net, expanded(rows), make_tables(config.model), config.loss_profile)
    ffn_call, (_, x) = parts["ffn"]
    parts["norm"] = (ffn_call, (profile.first_block(learned.net).norm_ffn, x))
    objective, *inputs = parts["objective"]
    parts["gradient"] = (profile.with_backward(objective), *inputs)
    calls = {"expand": lambda: expanded(rows)}
    for name in ("stem", "norm", "attention", "ffn", "block", "trunk", "heads", "forward", "loss", "gradient"):
        calls[name] = on_each_device(parts[name][0], device_mesh, *parts[name][1:])

    # Shaped as gradients are: one net on each device.
    gradients = mesh.put(device_mesh, jax.tree.map(lambda p: p[None].repeat(device_mesh.size, 0), learned.net), "local")
    mean = jax.jit(mesh.shard(lambda own: reduce.mean_gradients(jax.tree.map(lambda g: g[0], own)), device_mesh, inputs=("local",), outputs="result"))
    without_ema = Learned(learned.net, learned.opt_state, None, learned.statistics)
    schedule = mesh.put(device_mesh, jax.tree.map(lambda s: s[0], optim.make_schedule(config, 0, 1)), "schedule")

    def update(state, schedule):
        return step.update(state, state.net, state.statistics, schedule, config)  # the parameters stand for a gradient

    updated = jax.jit(mesh.shard(update, device_mesh, inputs=("state", "schedule"), outputs="state"))
    return calls | {"mean": lambda: mean(gradients), "optimizer": lambda: updated(without_ema, schedule), "step": lambda: whole.call(learned, placed)}


def part_flops(config) -> dict[str, int]:
    """FLOPs of each part for the whole batch (the optimizer's: on all devices); what is not a matrix product counts 0."""
    from kgo_shard.flops import forward_flops, muon_flops

    flops = {name: config.batch_size * count for name, count in forward_flops(config.model).items()}
    muon = max(1, config.data_parallel_devices) * muon_flops(config) if config.optimizer == "muon" else 0
    return flops | {"gradient": 3 * flops["forward"], "optimizer": muon, "step": 3 * flops["forward"]}


def measure_peak(device_mesh, dtype, repeats: int = 3, longest: float = 0.2) -> dict:
    """The fastest product of n x n matrices on all devices at once, FLOP/s of all together; n doubles until one takes `longest` seconds."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from kgo_shard import mesh

    rows, best, size, samples = NamedSharding(device_mesh, PartitionSpec(mesh.AXIS)), {"flops": 0.0}, 256, {}
    product = jax.jit(jnp.matmul, in_shardings=(rows, rows), out_shardings=rows)  # (D, n, n): a batch of one on each device
    while size <= 16384:
        x = jax.device_put(jnp.ones((device_mesh.size, size, size), dtype), rows)
        samples[size] = measure.time_calls({"product": lambda x=x: product(x, x)}, repeats)["product"]
        fastest = min(samples[size])
        best = max(best, {"flops": 2 * size**3 * device_mesh.size / fastest, "size": size}, key=lambda found: found["flops"])
        if fastest > longest:
            break
        size *= 2
    return best | {"samples": samples}


def run(options: dict, datadir: Path, devices: int, repeats: int, peak_tflops: float | None, show, longest: float = 0.2) -> dict:
    """The whole result. Raises measure.UnequalWork. `peak_tflops`: of one device, else a known one, else the measured one stands alone."""
    import jax

    from kgo_shard import mesh
    from kgo_shard.batches import find_files
    from kgo_shard.config import Config

    show("one step of both stacks, compared in exact mode")
    measure.refuse_unequal_work(options, datadir, devices)
    config = Config(**options, **measure.parallel(devices))
    device_mesh, flops = mesh.make_mesh(config), part_flops(config)
    peaks = {}
    for dtype in dict.fromkeys(("float32", config.compute_dtype)):
        show(f"the peak of products in {dtype}")
        peaks[dtype] = measure_peak(device_mesh, dtype, longest=longest)
    show("compile and time the parts")
    samples = measure.time_calls(make_calls(config, find_files(datadir / "train")), repeats)
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    measured = peaks[config.compute_dtype]["flops"]
    stated = peak_tflops or measure.known_peak(jax.local_devices()[0].device_kind)
    against = {"measured": measured} | ({"stated": stated * 1e12 * devices} if stated else {})
    works = {"model": flops["step"], "with Muon": flops["step"] + flops["optimizer"]}
    return measure.result(
        "seconds and FLOP/s of each part of a step, each compiled apart",
        options | {"devices": devices, "repeats": repeats, "peak_tflops": stated, "rows": datadir.name},
        samples=samples,
        flops={name: flops.get(name, 0) for name in samples},
        peaks=peaks,
        sums={whole: {"parts": sum_of_parts(parts, seconds, config.model.num_layers), "whole": seconds[whole]} for whole, parts in SUMS.items()},
        utilisation={work: {peak: utilisation(count, seconds["step"], rate) for peak, rate in against.items()} for work, count in works.items()},
        formulas=FORMULAS,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, repeats=7)
    measure.add_devices(parser)
    parser.add_argument("--peak-tflops", type=float, help="of one device; default: its data sheet's in bfloat16, where it is known")
    arguments = parser.parse_args()
    devices = measure.use_devices(arguments.devices)
    measure.keep_compiled()
    found = run(options_of(arguments), arguments.datadir, devices, arguments.repeats, arguments.peak_tflops, measure.show)
    measure.write(arguments.json, found)
    from .tables import components_table, utilisation_lines

    print(components_table(found), *utilisation_lines(found), *FORMULAS.values(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
