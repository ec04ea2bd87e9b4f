"""Replays one recording of the original (shared/traces) through a stack and compares everything that was kept.

    python -m tests.parity.legacy.replay_recording CASE_DIR --data DIR [--stack legacy_pmap|kgo_shard] [--compute float64]
        [--json OUT] [--dump OUT.npz] [--recorded-kernel] [--perturbed]

CASE_DIR may be a case or its exact/ folder, which switches exact mode on. One line per item: name, equal bits or not, relative norm
error. Sets JAX's flags itself, so run it as a program, one case a process. `tests/parity/recordings.py` runs it for many cases and
judges what is not equal by the three-way bound.

Exit code 0: every item equal in all its bits. 1: something differs. 2: the recording could not be read. On another JAX than the
recordings' bits are bound to differ; on theirs (0.4.35) they depend on nothing but the processor's matrix kernels, so there:

- with the recordings' kernels every item must be equal as it is;
- else the case is replayed once more with the one product in which the kernels were found to differ summed as on the recording
  machine (`use_recorded_kernel`), and then every item must be equal. Exit code 0, and a line NOT THE RECORDINGS' KERNELS says how
  many items differed before. Nothing but that product was changed, so what differed lies downstream of it;
- what differs even so is a finding: exit code 1.
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
VALIDATION_SEED = 999983
# The order of the metric vectors in values.npz (spec, section 3).
METRICS = (
    "loss p0loss p1loss p0softloss p1softloss p0lopt p0sopt vloss tdvloss1 tdvloss2 tdvloss3 tdsloss oloss sloss fploss skloss smloss "
    "sbcdfloss sbpdfloss sdregloss leadloss vtimeloss evstloss esstloss pacc1 wsum"
).split()
LOGGED_TERMS = ("p0loss", "vloss", "oloss", "skloss", "pacc1")


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


def perturb_starts(jax):
    """Has legacy_pmap load every checkpoint with each parameter one unit in the last place off, up or down."""
    import legacy_pmap
    from legacy_pmap.step import get_carry, put_state

    plain, rng = legacy_pmap.load_checkpoint, np.random.default_rng(0)

    def nudge(leaf):
        up = rng.integers(0, 2, leaf.shape).astype(bool)
        return np.nextafter(leaf, np.where(up, np.inf, -np.inf).astype(leaf.dtype))

    def load_checkpoint(path, config):
        state = plain(path, config)
        carry = get_carry(state)
        return put_state(config, jax.tree_util.tree_map(nudge, carry.params), *carry[1:], state.step, state.samples)

    legacy_pmap.load_checkpoint = load_checkpoint


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


def compare_state(prefix, recorded_path, replayed):
    recorded = read_recorded_state(recorded_path)[0]
    for name in recorded.keys() | replayed.keys():
        yield f"{prefix}/{name}", recorded.get(name), replayed.get(name)


def replay_steps(stack, config, case, folder, files, data, unprinted):
    """From step_0000 through the run's batches: yields (name, recorded, replayed) at every kept step, the loaded start included.

    Fills `unprinted` with the figures of every log line in full precision ("figures/step=1/loss", "figures/VAL/p0loss").
    """
    step = stack.make_train_step(config)
    state = stack.load_checkpoint(folder / "step_0000.pkl", config)
    yield from compare_state("step_0000", folder / "step_0000.pkl", stack.to_host(state))
    order = sorted(files)
    np.random.default_rng(EPOCH_SEED).shuffle(order)
    stream = stack.read_batches(order, config, EPOCH_SEED)
    dtype = dtype_of(config)
    done, totals, since = 0, {}, 0
    while done < case["steps"]:
        batches = [next(stream) for _ in range(min(config.steps_per_jit, case["steps"] - done))]
        state, metrics = step(state, batches)
        done += len(batches)
        add_to(totals, metrics, dtype)
        if done - since >= config.print_every:
            figures = figures_of(totals, done - since) | {"grad_norm": totals["grad_norm"] / (done - since), "lr": dtype(metrics["lr"])}
            unprinted.update({f"figures/step={done}/{name}": value for name, value in figures.items()})
            totals, since = {}, done
        path = folder / f"step_{done:04d}.pkl"
        if path.exists():
            yield from compare_state(path.stem, path, stack.to_host(state))
    if (folder / "train.log").exists():
        quiet = stack.Config(**{**options_of(case["flags"]), "compute_dtype": config.compute_dtype, "symmetry_type": "none"})
        evaluate, totals, count = stack.make_eval_step(config), {}, 0
        val_files = [str(path) for path in sorted((Path(data) / "val").glob("*.npz"))]
        for batch in stack.read_batches(val_files, quiet, config.seed + int(stack.to_host(state)["samples"]) + VALIDATION_SEED):
            add_to(totals, evaluate(state, batch), dtype)
            count += 1
            if count == config.max_val_batches:
                break
        unprinted.update({f"figures/VAL/{name}": value for name, value in figures_of(totals, count).items()})


def dtype_of(config):
    return np.float64 if config.compute_dtype == "float64" else np.float32


def add_to(totals, metrics, dtype):
    for name, value in metrics.items():
        totals[name] = totals.get(name, dtype(0)) + dtype(value)


def figures_of(totals, count):
    """What a log line shows: the loss is the mean over `count` steps, a term its sum over the sum of weights."""
    return {"loss": totals["loss"] / count} | {name: totals[name] / totals["wsum"] for name in LOGGED_TERMS}


def replay_values(stack, config, config_1, case, folder, files):
    """Everything of values.npz, taken as the traces' README says; "start/..." is the state it starts from, as loaded.

    kgo_shard's gradient function returns no moving statistics: those of its probe's step are taken, which is the train step's body.
    """
    start = min(path for path in folder.glob("step_*.pkl") if path.name != "step_0000.pkl")
    batch = next(stack.read_batches(sorted(files), config, case["batch_seed"]))
    closed = {"constants": True} if "constants" in inspect.signature(stack.make_gradient).parameters else {}  # legacy_pmap only
    replayed, dtype = {}, dtype_of(config)

    def vector(metrics, loss_scale=1):
        return np.asarray([metrics[name] * (loss_scale if name == "loss" else 1) for name in METRICS], dtype)

    def one_probed_step(config):
        """The stages of one step as a flat dict, and the moving statistics after it."""
        after, stages = stack.make_probe(config)(stack.load_checkpoint(start, config), batch)
        host = stack.to_host(after)
        if not isinstance(stages, dict):  # kgo_shard's named tuple
            stages = {f"loss_terms/{name}": array for name, array in stages.terms_local._asdict().items()}
        return stages, [host["moving_sum"], host["moving_weight"]]

    def gradient_on(config, name, loss_scale):
        grads, metrics = stack.make_gradient(config, **closed)(stack.load_checkpoint(start, config), batch)
        replayed.update({f"grad_{name}/{leaf}": array for leaf, array in grads.items()})
        replayed[f"metrics_train_{name}"] = vector(metrics, loss_scale)
        if "moving_sum" in metrics:
            return [metrics["moving_sum"], metrics["moving_weight"]]

    state = stack.load_checkpoint(start, config_1)
    yield from compare_state("start", start, stack.to_host(state))
    replayed.update({f"out/{name}": array[:4] for name, array in stack.head_outputs(state, batch, config_1).items()})
    moving = gradient_on(config_1, "1", 1) or one_probed_step(config_1)[1]
    replayed["moving_1"] = np.asarray(moving, dtype)
    replayed["metrics_eval_1"] = vector(stack.make_eval_step(config_1, **closed)(state, batch))
    if config.data_parallel:
        moving = gradient_on(config, "D", case["devices"])  # the loss is recorded before the division by D
        stages, probed_moving = one_probed_step(config)
        replayed["moving_D"] = np.asarray(moving or probed_moving, dtype)
        replayed["metrics_local_D"] = np.stack([stages[f"loss_terms/{name}"] for name in METRICS], axis=1)
    with np.load(folder / "values.npz") as recorded:
        for name in recorded.keys() | replayed.keys():
            yield f"values/{name}", recorded[name] if name in recorded else None, replayed.get(name)


def replay_batches(stack, config, case, folder, files):
    with np.load(folder / "batches.npz") as recorded:
        stream = stack.read_batches(sorted(files), config, case["batch_seed"])
        replayed = {f"{i}/{name}": array for i in range(3) for name, array in next(stream).items()}
        for name in recorded.keys() | replayed.keys():
            yield f"batches/{name}", recorded[name] if name in recorded else None, replayed.get(name)


def without_timings(line):
    return re.sub(r", (time|sps|TFLOPS|MFU)=[^,]*", "", line)


def replay_log(stack, config, case, folder, data):
    """The trainer itself, resumed at step 0: (name, recorded text, printed text) without the timings; and its last file's meta."""
    with tempfile.TemporaryDirectory() as folder_out:
        options = {name: getattr(config, name) for name in config.__dataclass_fields__} | {"traindir": folder_out, "datadir": str(data)}
        checkpoint = Path(folder_out) / "checkpoint_jax.pkl"
        checkpoint.write_bytes((folder / "step_0000.pkl").read_bytes())
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            stack.train(stack.Config(**options))
        meta = read_recorded_state(checkpoint)[1]
    lines = [without_timings(line) for line in printed.getvalue().splitlines() if line.startswith(("step=", "  VAL"))]
    recorded = [without_timings(line) for line in (folder / "train.log").read_text().splitlines()]
    for i in range(max(len(lines), len(recorded))):
        yield f"log/{i}", recorded[i] if i < len(recorded) else None, lines[i] if i < len(lines) else None
    recorded_meta = read_recorded_state(sorted(folder.glob("step_*.pkl"))[-1])[1]
    for name in recorded_meta.keys() | meta.keys():
        yield f"meta/{name}", repr(recorded_meta[name]) if name in recorded_meta else None, repr(meta[name]) if name in meta else None


def compare(name, recorded, replayed):
    """{"name", "equal", "relative"}: equal means same shape, dtype and bits; relative is |new-old| / |old|."""
    if recorded is None or replayed is None:
        return {"name": name, "equal": False, "relative": None, "note": "not replayed" if replayed is None else "not recorded"}
    if isinstance(recorded, str):
        note = {} if recorded == replayed else {"note": f"recorded {recorded!r}, replayed {replayed!r}"}
        return {"name": name, "equal": recorded == replayed, "relative": None, "text": replayed, **note}
    if recorded.shape != replayed.shape:
        return {"name": name, "equal": False, "relative": None, "note": f"shape {replayed.shape}, recorded {recorded.shape}"}
    if replayed.dtype.name == "bfloat16" and recorded.dtype == np.float32:
        replayed = replayed.astype(np.float32)  # a gradient in values.npz: NumPy's files have no bfloat16, so it was widened
    old, new = (np.asarray(array).astype(np.float64) for array in (recorded, replayed))
    size, apart = np.linalg.norm(old.ravel()), np.linalg.norm((new - old).ravel())
    equal = recorded.dtype == replayed.dtype and recorded.tobytes() == replayed.tobytes()
    return {"name": name, "equal": equal, "relative": float(apart / size) if size else float(apart)}


def replay(stack, config, config_1, case, folder, files, data, skip_log):
    """Everything of one case: (items as `compare` makes them, replayed arrays by name)."""
    unprinted = {}
    stages = [replay_values(stack, config, config_1, case, folder, files),
              replay_steps(stack, config, case, folder, files, data, unprinted)]
    if (folder / "batches.npz").exists():
        stages.insert(0, replay_batches(stack, config, case, folder, files))
    if (folder / "train.log").exists() and not skip_log:
        stages.append(replay_log(stack, config, case, folder, data))
    items, arrays = [], {}
    for name, recorded, replayed in (item for stage in stages for item in sorted(stage, key=lambda item: item[0])):
        items.append(compare(name, recorded, replayed))
        if isinstance(replayed, np.ndarray | np.generic):
            arrays[name] = np.asarray(replayed)
    return items, arrays | {name: np.asarray(value) for name, value in unprinted.items()}


def show(items, quiet):
    for item in items:
        if not (quiet and item["equal"]):
            error = "" if item["relative"] is None else f"  {item['relative']:.3e}"
            print(f"{item['name']:60s} {'equal' if item['equal'] else 'DIFFERS'}{error}  {item.get('note', '')}".rstrip(), flush=True)


def all_equal(items):
    return all(item["equal"] for item in items)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case_dir")
    parser.add_argument("--data", required=True, help="the data folder, with train/ and val/")
    parser.add_argument("--stack", default="legacy_pmap")
    parser.add_argument("--compute", help="compute dtype instead of the case's; float64: the reference (legacy_pmap only)")
    parser.add_argument("--json")
    parser.add_argument("--dump", help="npz of the replayed arrays")
    parser.add_argument("--skip-log", action="store_true", help="do not run the trainer itself")
    parser.add_argument("--recorded-kernel", action="store_true", help="legacy_pmap only: see use_recorded_kernel")
    parser.add_argument("--perturbed", action="store_true", help="legacy_pmap only: a noise run, see perturb_starts")
    parser.add_argument("--quiet", action="store_true", help="only items that differ")
    args = parser.parse_args(argv)

    started = time.perf_counter()
    try:
        case, folder, exact = read_case(args.case_dir)
    except (OSError, ValueError) as error:
        print(f"{args.case_dir}: not a recording ({error})", file=sys.stderr)
        return 2
    files = [str(path) for path in sorted((Path(args.data) / "train").glob("*.npz"))]
    if not files:
        print(f"no files in {args.data}/train", file=sys.stderr)
        return 2
    float64 = args.compute == "float64"
    jax = start_jax(case["devices"], exact, float64)
    stack = importlib.import_module(args.stack)
    if args.recorded_kernel:
        use_recorded_kernel(jax, case["batch"])
    if args.perturbed:
        perturb_starts(jax)
    options = {**options_of(case["flags"]), "compute_dtype": args.compute or case["compute"]}
    config = stack.Config(**options)
    config_1 = stack.Config(**{**options, "data_parallel": False})

    def run():
        return replay(stack, config, config_1, case, folder, files, args.data, args.skip_log or float64 or args.perturbed)

    items, arrays = run()
    if float64:
        for item in items:
            dtype = arrays[item["name"]].dtype if item["name"] in arrays else None
            if dtype not in (None, np.float64, np.int64) and not item["name"].startswith("batches/"):
                item["note"] = f"dtype {dtype} in the float64 reference"
    show(items, args.quiet)
    as_recorded = args.stack == "legacy_pmap" and jax.__version__ == case["jax"] and not (float64 or args.perturbed)
    kernels, reproduced = None, all_equal(items)
    if as_recorded and not args.recorded_kernel:
        kernels = "the recordings'"
        if not reproduced:
            use_recorded_kernel(jax, case["batch"])
            emulated = run()[0]
            reproduced = all_equal(emulated)
            differing = sum(not item["equal"] for item in items)
            kernels = "others, all bits equal with the recordings' emulated" if reproduced else "unknown"
            print(f"NOT THE RECORDINGS' KERNELS: {differing} of {len(items)} items differ with this processor's matrix kernels; with the "
                  "gradient of policy_head/linear_board/w on one device summed as on the recording machine "
                  + ("all are equal in every bit" if reproduced else "these still differ:"), flush=True)
            show(emulated, quiet=True)
    equal = sum(item["equal"] for item in items)
    worst = max((item["relative"] for item in items if item["relative"] is not None), default=0.0)
    seconds = time.perf_counter() - started
    bfloat16 = [name for name, array in arrays.items() if array.dtype.name == "bfloat16"]  # NumPy's files would lose the dtype
    print(f"{folder}: {equal} of {len(items)} items equal, worst relative {worst:.3e}, jax {jax.__version__}, "
          f"{'exact' if exact else 'default'} mode, compute {config.compute_dtype}, {seconds:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps({
            "case": str(folder), "stack": args.stack, "jax": jax.__version__, "exact": exact, "compute": config.compute_dtype,
            "xla_flags": os.environ["XLA_FLAGS"], "kernels": kernels, "reproduced": reproduced, "seconds": seconds, "items": items,
            "bfloat16": bfloat16}, indent=1))
    if args.dump:
        np.savez(args.dump, **{name: array.view(np.uint16) if name in bfloat16 else array for name, array in arrays.items()})
    return 0 if reproduced else 1


if __name__ == "__main__":
    sys.exit(main())
