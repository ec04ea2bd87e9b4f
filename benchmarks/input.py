"""How fast do rows come in, how many bytes are they, and what do checkpoints and state weigh?

    python -m benchmarks.input [--json FILE] [--datadir DATA] [--repeats 5] [--model-kind b12c192] ...

Rows a second from compressed files on the disk to host batches, the original's loader against ours, in turns, with and without history
and symmetry; from files of 2,048 rows, the real ones of DATA again and again, because self-play writes thousands to a file and its small
samples would show little but the opening of files; and to finished arrays on one device (ours are finished there): one, because with several logical devices the time of
starting a program on each of them would be all that is seen of it. Bytes of a row as it is handed to the devices. Seconds
to save and to load a checkpoint in the original's format and in ours. Bytes of state on each device, by kind, and what the compiled
step says of its own memory.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from . import measure
from .step import add_arguments, options_of

ROWS_A_FILE = 2048


def write_large_files(files, folder: Path, count: int = 2, num_rows: int = ROWS_A_FILE) -> list[Path]:
    """Compressed files of `num_rows` rows each: those of `files` one after the other, from the beginning again where they end."""
    import numpy as np

    kept: dict[str, list] = {}
    for path in files:
        with np.load(path) as rows:
            for key in rows.files:
                kept.setdefault(key, []).append(rows[key])
    arrays = {key: np.concatenate(parts) if parts[0].ndim else parts[0] for key, parts in kept.items()}
    found = next(len(array) for array in arrays.values() if array.ndim)
    paths = [folder / f"data{number}.npz" for number in range(count)]
    for number, path in enumerate(paths):
        chosen = np.arange(number * num_rows, (number + 1) * num_rows) % found
        np.savez_compressed(path, **{key: array[chosen] if array.ndim else array for key, array in arrays.items()})
    return paths


def time_loaders(config, files, repeats: int, show) -> dict[str, dict[str, list[float]]]:
    """Rows a second of every repeat: a whole pass over the files, "host" batches or "finished" arrays on the device."""
    import jax
    import legacy_pmap

    from kgo_shard import augment, mesh
    from kgo_shard.batches import read_packed_batches

    from .contenders import legacy_config

    device_mesh = mesh.make_mesh(config.replace(**measure.parallel(1)))
    expand = jax.jit(lambda rows: augment.expand({key: value[0] for key, value in rows.items()}, config.pos_len))

    def finish_ours(batch):
        return expand(mesh.put_batches(device_mesh, [batch]))

    found = {}
    for history in (True, False):
        # Symmetry goes with history, as training has both; without either a loader only reads and unpacks.
        chosen = config.replace(enable_history_matrices=history, symmetry_type="xyt" if history else "none")
        old = legacy_config(chosen)
        ways = {
            "original, host": (lambda old=old: legacy_pmap.read_batches(files, old, 0), None),
            "ours, host": (lambda chosen=chosen: read_packed_batches(files, chosen, 0), None),
            "original, finished": (lambda old=old: legacy_pmap.read_batches(files, old, 0), jax.device_put),
            "ours, finished": (lambda chosen=chosen: read_packed_batches(files, chosen, 0), finish_ours),
        }
        samples = {name: [] for name in ways}
        for repeat in range(-1, repeats):  # the first pass warms up the files and the programs, and is not kept
            for name, (stream, finish) in ways.items():
                started, rows = time.perf_counter(), 0
                for batch in stream():
                    rows += config.batch_size
                    if finish is not None:
                        jax.block_until_ready(finish(batch))
                if repeat >= 0:
                    samples[name].append(rows / (time.perf_counter() - started))
            show(f"{'with' if history else 'without'} history and symmetry, pass {repeat + 1} of {repeats}")
        found["with history and symmetry" if history else "without"] = samples
    return found


def row_bytes(config, files) -> dict[str, float]:
    """Bytes of a row as each side hands it to the devices."""
    import legacy_pmap

    from kgo_shard.batches import read_packed_batches

    from .contenders import legacy_config

    batches = {"original": next(legacy_pmap.read_batches(files, legacy_config(config), 0)), "ours": next(read_packed_batches(files, config, 0))}
    return {name: sum(array.nbytes for array in batch.values()) / config.batch_size for name, batch in batches.items()}


def time_checkpoints(config, repeats: int, show) -> dict[str, list[float]]:
    """Seconds to write and to read the state, in the original's format and in ours (until it is complete on the disk)."""
    from kgo_shard import checkpoint, store
    from kgo_shard.state import init_state

    state = init_state(config)
    samples: dict[str, list[float]] = {name: [] for name in ("save, original's", "load, original's", "save, ours", "load, ours")}

    def timed(name, work):
        started = time.perf_counter()
        work()
        samples[name].append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as folder:
        pickled, kept = Path(folder) / checkpoint.FILE_NAME, store.Store(Path(folder), keep=1)
        for number in range(repeats):
            timed("save, original's", lambda: checkpoint.save_checkpoint(pickled, state, config))
            timed("load, original's", lambda: checkpoint.load_checkpoint(pickled, config))

            def save():
                kept.save(number, checkpoint.to_trees(state.learned), {"step": number})
                kept.wait()

            timed("save, ours", save)
            timed("load, ours", lambda: store.read(Path(folder) / store.FOLDER / f"{number:08d}"))
            show(f"checkpoint {number + 1} of {repeats}")
        kept.close()
    return samples


def state_bytes(config) -> dict[str, int]:
    """Bytes of the state on one device, by kind, as the arrays really lie."""
    import jax

    from kgo_shard.state import init_state

    learned = init_state(config).learned

    def on_first_device(tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == leaf.addressable_shards[0].device
        )

    kinds = {"parameters": learned.net, "moments": learned.opt_state, "moving average": learned.ema, "statistics": learned.statistics}
    return {name: on_first_device(tree) for name, tree in kinds.items()}


def step_memory(config, files) -> dict[str, dict[str, int]]:
    """What each compiled step says of its memory, see measure.bytes_of; the program of one device."""
    from . import contenders

    found = {}
    for contender in (contenders.make_pmap(config, files, 1), contenders.make_shard_map(config, files, 1)):
        found[contender.name] = measure.bytes_of(contender.lower().compile())
    return found


def run(options: dict, datadir: Path, devices: int, repeats: int, show) -> dict:
    from kgo_shard.batches import find_files
    from kgo_shard.config import Config

    measure.refuse_unequal_work(options, datadir, devices)
    config, files = Config(**options, **measure.parallel(devices), ema_decay=0.999), find_files(datadir / "train")
    with tempfile.TemporaryDirectory() as folder:
        loaders = time_loaders(config, write_large_files(files, Path(folder)), repeats, show)
    weights = row_bytes(config, files)
    medians = {mode: {name: statistics.median(rates) for name, rates in samples.items()} for mode, samples in loaders.items()}
    return measure.result(
        "rows a second from files to batches, bytes a row, seconds to save and load, bytes of state",
        options | {"devices": devices, "repeats": repeats, "rows": str(datadir.name), "rows_a_file": ROWS_A_FILE, "ema_decay": 0.999},
        rows_a_second=loaders,
        bytes_a_row=weights,
        checkpoints=time_checkpoints(config, repeats, show),
        state_bytes=state_bytes(config),
        step_memory=step_memory(config, files),
        ratios={
            f"{mode}, {place}": rates[f"ours, {place}"] / rates[f"original, {place}"]
            for mode, rates in medians.items()
            for place in ("host", "finished")
        }
        | {"bytes a row": weights["ours"] / weights["original"]},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, repeats=5)
    measure.add_devices(parser)
    arguments = parser.parse_args()
    devices = measure.use_devices(arguments.devices)
    found = run(options_of(arguments), arguments.datadir, devices, arguments.repeats, measure.show)
    measure.write(arguments.json, found)
    for name, ratio in found["ratios"].items():
        print(f"{name}: ours {ratio:.2f} x the original's")
    print(f"bytes a row: {found['bytes_a_row']['ours']:.0f}, the original's {found['bytes_a_row']['original']:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(measure.ended(main))
