"""How does a step change with the number of devices, and what do its collectives cost? Both stacks, D = 1, 2, 4, 8, 16.

    python -m benchmarks.scaling [--json FILE] [--counts 1 2 4 8 16] [--batch-size 16] [--local-batch 2] [--link-gbytes 450] ...

Every row says which of two questions it belongs to:
- "fixed global batch": the same rows in all, so each device has fewer: how much of one step can be parallelised;
- "fixed local batch": the same rows on each device, so there are more in all: how throughput grows with the work.
Where there is no accelerator the devices are logical ones that share the cores: then efficiency falls as 1 / D even of a perfect program,
and only two things can be read from a row, the two stacks against each other and what it costs to divide the same work further.

The collectives are read from the compiled step (one entry for each array, however the compiler combines them). Their time is that of a
program which holds nothing else, with the same arrays: the compiled text of both must list the same. Beside it stands what a ring
all-reduce takes on a link of `--link-gbytes` GB/s in each direction, without latency: a lower bound. The default is NVLink 4 of an H100
or H200: 900 GB/s, both directions together, by NVIDIA's data sheets.

Stacks take turns; numbers of devices come one after the other, as the states of all would not fit: a drift of the machine is in them.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from . import measure
from .step import add_arguments, options_of, time_steps

GLOBAL, LOCAL = "fixed global batch", "fixed local batch"


def efficiency(mode: str, alone: float, together: float, devices: int) -> float:
    """Of `devices` devices against one, from seconds a step: 1 where D devices do D times the work of one in the same time.

    Fixed global batch: t(1) / (D t(D)). Fixed local batch: t(1) / t(D), as D devices then have D times the rows.
    """
    return alone / together / (devices if mode == GLOBAL else 1)


def predicted_seconds(bytes_each: int, devices: int, link_gbytes: float) -> float:
    """Seconds of a ring all-reduce of `bytes_each` bytes on each device: each sends 2 (D - 1) / D of them (Patarasuk and Yuan, 2009)."""
    return 2 * (devices - 1) / devices * bytes_each / (link_gbytes * 1e9)


def settings_of(counts: list[int], batch_size: int, local_batch: int) -> list[tuple[str, int, int]]:
    """(mode, devices, global batch) of every row."""
    return [(GLOBAL, count, batch_size) for count in counts] + [(LOCAL, count, local_batch * count) for count in counts]


def collectives_of(compiled) -> Counter:
    """The collectives of a compiled program that cross devices."""
    from kgo_shard.diff.collectives import compiled_collectives

    found = compiled_collectives(compiled.as_text())
    return Counter({collective: count for collective, count in found.items() if collective.devices != 1})


def make_collectives(device_mesh, collectives: Counter):
    """A call that does these all-reduces and nothing else, and the collectives of its own compiled text.

    Raises NotImplementedError for another kind than all_reduce, which the step of replicated state does not have.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from kgo_shard import mesh

    others = {collective.kind for collective in collectives} - {"all_reduce"}
    if others:
        raise NotImplementedError(f"no program of only {', '.join(sorted(others))}")
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "s32": jnp.int32}
    rows = NamedSharding(device_mesh, PartitionSpec(mesh.AXIS))
    arrays = [
        jax.device_put(jnp.ones((device_mesh.size, collective.elements), dtypes[collective.dtype]), rows)
        for collective, count in collectives.items()
        for _ in range(count)
    ]

    def body(*arrays):
        return jax.lax.psum(arrays, mesh.AXIS)

    run = jax.jit(jax.shard_map(body, mesh=device_mesh, in_specs=PartitionSpec(mesh.AXIS), out_specs=PartitionSpec(), check_vma=True))
    return lambda: run(*arrays), collectives_of(run.lower(*arrays).compile())


def time_collectives(device_mesh, collectives: Counter, repeats: int) -> list[float]:
    """Seconds of every repeat of the collectives alone; none where there are no collectives. UnequalWork where they are not the step's."""
    if not collectives:
        return []
    call, own = make_collectives(device_mesh, collectives)
    if own != collectives:
        raise measure.UnequalWork(f"the program of only the collectives has others: {own - collectives} for {collectives - own}")
    return measure.time_calls({"collectives": call}, repeats)["collectives"]


def measure_row(mode: str, devices: int, batch_size: int, options: dict, files, repeats: int, link_gbytes: float) -> dict[str, Any]:
    """One number of devices: samples of both stacks, and the collectives of the new one; or why there are none."""
    from kgo_shard import mesh
    from kgo_shard.config import Config, ConfigError
    from kgo_shard.diff.collectives import total_bytes

    from . import contenders

    row: dict[str, Any] = {"mode": mode, "devices": devices, "batch_size": batch_size}
    try:
        config = Config(**options | {"batch_size": batch_size}, **measure.parallel(devices))
        device_mesh = mesh.make_mesh(config)
    except ConfigError as error:
        return row | {"not run": str(error)}
    made = [contenders.make_pmap(config, files, 2), contenders.make_shard_map(config, files, 2)]
    steps = time_steps(made, repeats, 0, lambda _: None)
    compiled = {contender.name: collectives_of(contender.lower().compile()) for contender in made}
    found = compiled["shard_map"]
    return row | {
        "samples": {name: [step["whole"] for step in samples["latency"]] for name, samples in steps.items()},
        "collectives": {name: {"arrays": sum(count.values()), "bytes": total_bytes(count)} for name, count in compiled.items()},
        "collectives alone": time_collectives(device_mesh, found, repeats),
        "predicted": predicted_seconds(total_bytes(found), devices, link_gbytes),
    }


def add_ratios(rows: list[dict[str, Any]]):
    """Efficiency and cost of each stack against one device in the same mode, and shard_map against pmap, from the medians."""
    medians = {
        (row["mode"], row["devices"], name): measure.summary(times)["median"] for row in rows for name, times in row.get("samples", {}).items()
    }
    for row in rows:
        mode, devices = row["mode"], row["devices"]
        if "samples" not in row:
            continue
        row["ratio"] = medians[mode, devices, "shard_map"] / medians[mode, devices, "pmap"]
        if (mode, 1, "pmap") in medians:
            pairs = {name: (medians[mode, 1, name], medians[mode, devices, name]) for name in row["samples"]}
            row["efficiency"] = {name: efficiency(mode, alone, together, devices) for name, (alone, together) in pairs.items()}
            # On shared cores a perfect program takes as long as one device with all the rows.
            rows_each = 1 if mode == GLOBAL else devices
            row["cost on shared cores"] = {name: together / (alone * rows_each) for name, (alone, together) in pairs.items()}


def run(options: dict, datadir: Path, counts: list[int], local_batch: int, repeats: int, link_gbytes: float, show) -> dict:
    """The whole result. Raises measure.UnequalWork: the largest number of devices that is there is compared first."""
    import jax

    from kgo_shard.batches import find_files

    largest = max((count for count in counts if count <= jax.local_device_count() and options["batch_size"] % count == 0), default=1)
    show("one step of both stacks, compared in exact mode")
    measure.refuse_unequal_work(options, datadir, largest)
    files, rows = find_files(datadir / "train"), []
    for mode, devices, batch_size in settings_of(counts, options["batch_size"], local_batch):
        same = next((row for row in rows if (row["devices"], row["batch_size"]) == (devices, batch_size)), None)
        show(f"{mode}, {devices} devices, {batch_size} rows")
        # The two modes share a row: it is measured once.
        rows.append(same | {"mode": mode} if same else measure_row(mode, devices, batch_size, options, files, repeats, link_gbytes))
    add_ratios(rows)
    shared = jax.default_backend() == "cpu"
    return measure.result(
        "seconds of a step over the number of devices, and what its collectives take",
        options
        | {"counts": counts, "local_batch": local_batch, "repeats": repeats, "link_gbytes": link_gbytes, "rows": datadir.name, "devices": largest},
        shared_cores=shared,
        statement="Logical CPU devices share the cores: no speed-up follows from them." if shared else "Each device is a device of its own.",
        rows=rows,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, repeats=3)
    parser.add_argument("--counts", type=measure.positive, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--local-batch", type=measure.positive, default=2)
    parser.add_argument("--link-gbytes", type=float, default=450.0, help="GB/s of a link in each direction")
    arguments = parser.parse_args()
    measure.start_devices(max(arguments.counts))
    measure.keep_compiled()
    chosen = (arguments.counts, arguments.local_batch, arguments.repeats, arguments.link_gbytes)
    found = run(options_of(arguments), arguments.datadir, *chosen, measure.show)
    measure.write(arguments.json, found)
    from .tables import scaling_table

    print(scaling_table(found), found["statement"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
