"""Replays one recording of the original (shared/traces) through a stack and compares everything that was kept.

    python -m tests.parity.legacy.replay_recording CASE_DIR --data DIR [--stack legacy_pmap] [--compute float64] [--json OUT] [--dump OUT.npz]
        [--recorded-kernel]

CASE_DIR may be a case or its exact/ folder, which switches exact mode on. One line per item: name, equal bits or not, relative norm
error. Exit code 0: all equal; 1: something differs; 2: the recording could not be read. Sets JAX's flags itself, so run it as a
program, one case a process.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import pickle
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

EXACT_FLAGS = "--xla_disable_hlo_passes=fusion --xla_cpu_max_isa=SSE4_2"
EPOCH_SEED = 1234


def read_case(folder):
    """The case's settings, its folder of arrays, and whether that one was recorded in exact mode."""
    folder = Path(folder)
    exact = folder.name == "exact"
    return json.loads(((folder.parent if exact else folder) / "case.json").read_text()), folder, exact


def start_jax(devices, exact, float64):
    """Everything that must be set before JAX starts."""
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}", EXACT_FLAGS if exact else ""]
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if flag)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if float64:
        os.environ["JAX_ENABLE_X64"] = "1"
    import jax

    assert jax.local_device_count() == devices, (jax.local_device_count(), devices)
    return jax


def use_recorded_kernel(jax, rows, block=376):
    """Sums the policy board's weight gradient on one device in blocks of 376 of its 2592 points, in order.

    The recording machine's matrix kernel cut that one contraction so; another processor's cuts elsewhere (found by trying all
    cuts: this one gives the recorded bits, in both modes). It is the only product of the recordings that showed such a difference.
    """
    import legacy_pmap.model

    plain = legacy_pmap.model.matmul

    @jax.custom_vjp
    def blocked(x, w):
        return x @ w.T

    def backward(saved, g):
        x, w = saved
        flat_g, flat_x, total = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]), None
        for i in range(0, flat_g.shape[0], block):
            part = jax.lax.dot_general(flat_g[i : i + block], flat_x[i : i + block], (((0,), (0,)), ((), ())))
            total = part if total is None else total + part
        return g @ w, total

    blocked.defvjp(lambda x, w: (x @ w.T, (x, w)), backward)

    def matmul(x, w, dtypes):
        ours = x.ndim == 3 and x.shape[0] == rows and w.shape[0] == legacy_pmap.model.NUM_POLICIES
        return blocked(x, w) if ours and dtypes.compute == np.float32 else plain(x, w, dtypes)

    legacy_pmap.model.matmul = matmul


def options_of(flags):
    """["--pos-len", "9", "--data-parallel"] -> {"pos_len": 9, "data_parallel": True}"""
    options, i = {}, 0
    while i < len(flags):
        name, value = flags[i][2:].replace("-", "_"), True
        if i + 1 < len(flags) and not flags[i + 1].startswith("--"):
            i += 1
            text = flags[i]
            value = int(text) if re.fullmatch(r"\d+", text) else float(text) if re.fullmatch(r"[\d.]+(e-?\d+)?", text) else text
        elif name.startswith("no_muon"):
            name, value = name[3:], False
        options[name] = value
        i += 1
    return options


def flatten(tree, prefix=""):
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else None
    if pairs is None:
        return {prefix: np.asarray(tree)}
    return {name: leaf for key, part in pairs for name, leaf in flatten(part, f"{prefix}/{key}" if prefix else str(key)).items()}


def read_recorded_state(path):
    """A recorded pickle under to_host's names. Trusted files of our own, so plain pickle."""
    with open(path, "rb") as file:
        payload = pickle.load(file)
    meta = payload.pop("meta")
    flat = {name: leaf for name, leaf in flatten(payload).items()}
    flat.update({name: np.asarray(meta[name], np.float32) for name in ("moving_sum", "moving_weight")})
    flat.update({name: np.asarray(meta[name], np.int64) for name in ("step", "samples")})
    return flat, meta


def replay_steps(stack, config, case, folder, files):
    """From step_0000 through the run's batches: yields (name, recorded, replayed) at every kept step."""
    step = stack.make_train_step(config)
    state = stack.load_checkpoint(folder / "step_0000.pkl", config)
    order = sorted(files)
    np.random.default_rng(EPOCH_SEED).shuffle(order)
    stream = stack.read_batches(order, config, EPOCH_SEED)
    done = 0
    while done < case["steps"]:
        count = min(config.steps_per_jit, case["steps"] - done)
        state, _ = step(state, [next(stream) for _ in range(count)])
        done += count
        path = folder / f"step_{done:04d}.pkl"
        if path.exists():
            recorded, replayed = read_recorded_state(path)[0], stack.to_host(state)
            for name in recorded.keys() | replayed.keys():
                yield f"step_{done:04d}/{name}", recorded.get(name), replayed.get(name)


def replay_values(stack, config, config_1, case, folder, files):
    """Everything of values.npz, taken as the traces' README says."""
    start = min(path for path in folder.glob("step_*.pkl") if path.name != "step_0000.pkl")
    batch = next(stack.read_batches(sorted(files), config, case["batch_seed"]))
    closed = {"constants": True} if "constants" in inspect.signature(stack.make_gradient).parameters else {}  # legacy_pmap only
    replayed = {}

    def vector(metrics, loss_scale=1):
        return np.asarray([metrics[name] * (loss_scale if name == "loss" else 1) for name in stack.METRICS], dtype)

    dtype = np.float64 if config.compute_dtype == "float64" else np.float32
    state = stack.load_checkpoint(start, config_1)
    replayed.update({f"out/{name}": array[:4] for name, array in stack.head_outputs(state, batch, config_1).items()})
    grads, metrics = stack.make_gradient(config_1, **closed)(state, batch)
    replayed.update({f"grad_1/{name}": array for name, array in grads.items()})
    replayed["metrics_train_1"] = vector(metrics)
    if "moving_sum" in metrics:
        replayed["moving_1"] = np.asarray([metrics["moving_sum"], metrics["moving_weight"]], dtype)
    replayed["metrics_eval_1"] = vector(stack.make_eval_step(config_1, **closed)(state, batch))
    if config.data_parallel:
        state = stack.load_checkpoint(start, config)
        grads, metrics = stack.make_gradient(config, **closed)(state, batch)
        replayed.update({f"grad_D/{name}": array for name, array in grads.items()})
        replayed["metrics_train_D"] = vector(metrics, case["devices"])  # recorded before the division by D
        if "moving_sum" in metrics:
            replayed["moving_D"] = np.asarray([metrics["moving_sum"], metrics["moving_weight"]], dtype)
        stages = stack.make_probe(config)(state, batch)[1]
        replayed["metrics_local_D"] = np.stack([stages[f"loss_terms/{name}"] for name in stack.METRICS], axis=1)
    with np.load(folder / "values.npz") as recorded:
        for name in recorded.keys() | replayed.keys():
            yield f"values/{name}", recorded[name] if name in recorded else None, replayed.get(name)


def replay_batches(stack, config, case, folder, files):
    with np.load(folder / "batches.npz") as recorded:
        stream = stack.read_batches(sorted(files), config, case["batch_seed"])
        replayed = {f"{i}/{name}": array for i in range(3) for name, array in next(stream).items()}
        for name in recorded.keys() | replayed.keys():
            yield f"batches/{name}", recorded[name] if name in recorded else None, replayed.get(name)


def replay_log(stack, config, case, folder, data):
    """The trainer itself, resumed at step 0: (name, recorded text, printed text) without the timings; and the last file's meta."""
    strip = lambda line: re.sub(r", (time|sps|TFLOPS|MFU)=[^,]*", "", line)
    with tempfile.TemporaryDirectory() as folder_out:
        options = {name: getattr(config, name) for name in config.__dataclass_fields__} | {"traindir": folder_out, "datadir": str(data)}
        checkpoint = Path(folder_out) / "checkpoint_jax.pkl"
        checkpoint.write_bytes((folder / "step_0000.pkl").read_bytes())
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            stack.train(stack.Config(**options))
        meta = read_recorded_state(checkpoint)[1]
    lines = [strip(line) for line in printed.getvalue().splitlines() if line.startswith(("step=", "  VAL"))]
    recorded = [strip(line) for line in (folder / "train.log").read_text().splitlines()]
    for i in range(max(len(lines), len(recorded))):
        yield f"log/{i}", recorded[i] if i < len(recorded) else None, lines[i] if i < len(lines) else None
    last = sorted(folder.glob("step_*.pkl"))[-1]
    yield f"meta/{last.stem}", repr(read_recorded_state(last)[1]), repr(meta)


def compare(name, recorded, replayed):
    """{"name", "equal", "relative"}: equal means same shape, dtype and bits; relative is |new-old| / |old|."""
    if recorded is None or replayed is None:
        return {"name": name, "equal": False, "relative": None, "note": "not replayed" if replayed is None else "not recorded"}
    if isinstance(recorded, str):
        note = {} if recorded == replayed else {"note": f"recorded {recorded!r}, replayed {replayed!r}"}
        return {"name": name, "equal": recorded == replayed, "relative": None, **note}
    if recorded.shape != replayed.shape:
        return {"name": name, "equal": False, "relative": None, "note": f"shape {replayed.shape}, recorded {recorded.shape}"}
    old, new = (np.asarray(array).astype(np.float64) for array in (recorded, replayed))
    size, apart = np.linalg.norm(old.ravel()), np.linalg.norm((new - old).ravel())
    equal = recorded.dtype == replayed.dtype and recorded.tobytes() == replayed.tobytes()
    return {"name": name, "equal": equal, "relative": float(apart / size) if size else float(apart)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case_dir")
    parser.add_argument("--data", required=True, help="the data folder, with train/ and val/")
    parser.add_argument("--stack", default="legacy_pmap")
    parser.add_argument("--compute", help="compute dtype instead of the case's; float64: the reference")
    parser.add_argument("--json")
    parser.add_argument("--dump", help="npz of the replayed arrays")
    parser.add_argument("--skip-log", action="store_true", help="do not run the trainer itself")
    parser.add_argument("--recorded-kernel", action="store_true", help="legacy_pmap only: see use_recorded_kernel")
    parser.add_argument("--quiet", action="store_true", help="only items that differ")
    args = parser.parse_args(argv)

    started = time.perf_counter()
    case, folder, exact = read_case(args.case_dir)
    float64 = args.compute == "float64"
    jax = start_jax(case["devices"], exact, float64)
    stack = importlib.import_module(args.stack)
    if args.recorded_kernel:
        use_recorded_kernel(jax, case["batch"])
    options = {**options_of(case["flags"]), "compute_dtype": args.compute or case["compute"]}
    config = stack.Config(**options)
    config_1 = stack.Config(**{**options, "data_parallel": False})
    files = stack.list_files(Path(args.data) / "train") if hasattr(stack, "list_files") else [
        str(path) for path in sorted((Path(args.data) / "train").glob("*.npz"))]
    if not files:
        print(f"no files in {args.data}/train", file=sys.stderr)
        return 2

    stages = [replay_values(stack, config, config_1, case, folder, files), replay_steps(stack, config, case, folder, files)]
    if (folder / "batches.npz").exists():
        stages.insert(0, replay_batches(stack, config, case, folder, files))
    if (folder / "train.log").exists() and not float64 and not args.skip_log:
        stages.append(replay_log(stack, config, case, folder, args.data))
    items, dump = [], {}
    for stage in stages:
        for name, recorded, replayed in sorted(stage, key=lambda item: item[0]):
            items.append(compare(name, recorded, replayed))
            if isinstance(replayed, np.ndarray):
                dump[name] = replayed
                if float64 and not name.startswith("batches/") and replayed.dtype not in (np.float64, np.int64):
                    items[-1]["note"] = f"dtype {replayed.dtype} in the float64 reference"
            item = items[-1]
            if not (args.quiet and item["equal"]):
                error = "" if item["relative"] is None else f"  {item['relative']:.3e}"
                print(f"{name:60s} {'equal' if item['equal'] else 'DIFFERS'}{error}  {item.get('note', '')}".rstrip(), flush=True)
    equal = sum(item["equal"] for item in items)
    worst = max((item["relative"] for item in items if item["relative"] is not None), default=0.0)
    seconds = time.perf_counter() - started
    print(f"{folder}: {equal} of {len(items)} items equal, worst relative {worst:.3e}, jax {jax.__version__}, "
          f"{'exact' if exact else 'default'} mode, compute {config.compute_dtype}, {seconds:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps({
            "case": str(folder), "stack": args.stack, "jax": jax.__version__, "exact": exact, "compute": config.compute_dtype,
            "xla_flags": os.environ["XLA_FLAGS"], "seconds": seconds, "items": items}, indent=1))
    if args.dump:
        np.savez(args.dump, **dump)
    return 0 if equal == len(items) else 1


if __name__ == "__main__":
    sys.exit(main())
