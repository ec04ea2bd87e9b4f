"""What every benchmark shares: who measures, with what, and how samples are summed up."""

import argparse
import contextlib
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "selfplay19"
RESULTS = Path(__file__).parent / "results"
CACHE = ROOT / ".cache" / "jax"  # compiled programs, where nobody times compiling
LOGICAL_DEVICES = 8
NOISE_RUNS = 4

# Dense bfloat16 TFLOP/s of one device, from the makers' data sheets (NVIDIA's without sparsity, half of what it prints for H100 and
# H200) and from Google Cloud's pages of each TPU version. The first name that `device_kind` begins with holds.
PEAK_TFLOPS = {
    "NVIDIA B200": 2250.0, "NVIDIA H200": 989.4, "NVIDIA GH200": 989.4, "NVIDIA H100 PCIe": 756.5, "NVIDIA H100": 989.4, "NVIDIA A100": 312.0,
    "TPU v4": 275.0, "TPU v5 lite": 197.0, "TPU v5e": 197.0, "TPU v5": 459.0, "TPU v6": 918.0,
}  # fmt: skip


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def writable(text: str) -> Path:
    """A file that can be written, for argparse: asked before the work, not after it."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: cannot be written ({error.strerror})") from None
    if not path.stat().st_size:
        path.unlink()
    return path


def ended(main: Callable[[], int]) -> int:
    """What a script's process ends with: 2 and one line where its work is refused."""
    from kgo_shard.config import ConfigError
    from kgo_shard.npz import DataError

    try:
        return main()
    except (UnequalWork, ConfigError, DataError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2


def start_devices(count: int) -> int:
    """How many devices there are: `count` logical ones where there is no accelerator. Before JAX starts; SystemExit for too many."""
    import jax

    from kgo_shard.__main__ import MOST_DEVICES

    if not 1 <= count <= MOST_DEVICES:
        raise SystemExit(f"{count} devices: give 1 to {MOST_DEVICES}")
    jax.config.update("jax_num_cpu_devices", count)
    return jax.local_device_count()


def use_devices(count: int) -> int:
    """How many devices to use; before JAX starts. `count` of them, which are logical ones where there is no accelerator; 0 means all
    accelerators, or eight logical devices. SystemExit where there are fewer."""
    there = start_devices(count or LOGICAL_DEVICES)
    if there < count:
        raise SystemExit(f"{count} devices are asked for, this machine has {there}")
    return count or there


def add_devices(parser: argparse.ArgumentParser):
    parser.add_argument("--devices", type=int, default=0, help="default: all accelerators, or 8 logical devices where there is none")


def keep_compiled():
    """Keep compiled programs between processes, unless the environment says where; for scripts that time no compiling."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(CACHE))


def parallel(devices: int) -> dict[str, Any]:
    """The options of a run on so many devices."""
    return {"data_parallel": devices > 1, "data_parallel_devices": devices if devices > 1 else 0}


def known_peak(kind: str) -> float | None:
    """Peak bfloat16 TFLOP/s of a device by its `device_kind`; None where the table lacks it, as for every CPU."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if kind.startswith(name)), None)


def show(text: str):
    """How far it is, where no result goes."""
    print(text, file=sys.stderr, flush=True)


def time_calls(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each call, in turns that rotate, every output awaited; one call before them compiles and warms up."""
    import jax

    for call in calls.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    with compiling_nothing():
        for repeat in range(repeats):
            for turn in range(len(order)):
                name = order[(repeat + turn) % len(order)]
                started = time.perf_counter()
                jax.block_until_ready(calls[name]())
                samples[name].append(time.perf_counter() - started)
    return samples


def interval(figure: Callable[..., float], *samples: list[float]) -> tuple[float, float]:
    """90 % of `figure(median, ...)`, from 2,000 draws with replacement of each list of samples (percentile bootstrap, Efron 1979)."""
    draws = random.Random(0)
    figures = sorted(figure(*(statistics.median(draws.choices(one, k=len(one))) for one in samples)) for _ in range(2000))
    return figures[100], figures[-101]


def ratio_interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Of the ratio of medians."""
    return interval(lambda a, b: a / b, ours, theirs)


def bytes_of(compiled) -> dict[str, int]:
    """Bytes of arguments, outputs and temporaries of one device, by the program's own analysis, and their sum, less what outputs take
    over from arguments. (Its `peak_memory_in_bytes` leaves temporaries out on CPU.)"""
    analysis = compiled.memory_analysis()
    kinds = {"arguments": "argument", "outputs": "output", "temporaries": "temp"}
    found = {name: getattr(analysis, f"{kind}_size_in_bytes") for name, kind in kinds.items()}
    return found | {"all": sum(found.values()) - analysis.alias_size_in_bytes}


def machine_gib() -> float:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def result(question: str, settings: dict[str, Any], **content) -> dict[str, Any]:
    """The start of a result: question, date, machine and versions, settings; then what was measured."""
    from kgo_shard.diff import report

    facts = report.environment_facts() | {"memory": f"{machine_gib():.0f} GiB", "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "not set")}
    return {"question": question, "date": datetime.date.today().isoformat(), "environment": facts, "settings": settings} | content


def write(path: Path | None, content: dict[str, Any]):
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, 90th percentile and spread (the range of the middle half) of samples."""
    ordered = sorted(seconds)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
    tenths = statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 9
    return {"median": statistics.median(ordered), "90 %": tenths[8], "spread": quartiles[2] - quartiles[0]}


@contextlib.contextmanager
def compiling_nothing():
    """AssertionError where a program is compiled inside: what is timed has to be compiled before."""
    import jax

    compiled = []

    def listen(event: str, seconds: float, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if compiled:
        raise AssertionError(f"{len(compiled)} programs were compiled while the clock ran")


class UnequalWork(RuntimeError):
    """The sides do not compute the same: nothing is timed."""


def refuse_unequal_work(options: dict[str, Any], datadir: Path, devices: int):
    """UnequalWork unless one step of old and new is equal in every bit of state and metrics, in exact mode and a process of its own.

    On logical CPU devices, whatever is timed: there equal arithmetic gives equal bits, and an accelerator is not taken twice.
    """
    words = [text for name, value in options.items() for text in words_of(name, value)]
    command = [sys.executable, "-m", "kgo_shard", "diff", "--exact", "--states-only", "--steps", "1", "--devices", str(devices)]
    environment = {"JAX_COMPILATION_CACHE_DIR": str(CACHE)} | os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*command, "--datadir", str(datadir), *words], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise UnequalWork(f"{' '.join(command[3:])}: exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")


def refuse_unequal_automatic(config, files, automatic):
    """UnequalWork unless the contender `jit` does what one device does with the whole batch: its state after one step, by the three-way
    bound against a float64 run of the old stack on one device. `jit` adds up the rows in an order of its own: so the noise runs have the
    rows in other orders, too, and they are several, because what that does to a small leaf one alone may miss.
    """
    from kgo_shard.diff import run
    from kgo_shard.diff.trace import Tape, record_states, state_stages
    from kgo_shard.state import TrainState, to_host

    options = {
        name: value
        for name in ("model_kind", "pos_len", "batch_size", "optimizer", "compute_dtype", "enable_history_matrices")
        if (value := getattr(config, name)) is not None
    }
    legacy, tape = run.old_stack(), Tape(options, files, 1)
    side = legacy.make_side(tape)
    noise_sides = [in_another_order(legacy.make_perturbed(side, tape, seed), config.batch_size, seed) for seed in range(NOISE_RUNS)]
    traces = [record_states(one, tape) for one in (side, legacy.make_reference(tape), *noise_sides)]
    # The first batch of the run's own epoch, as the sides read it.
    learned, _ = automatic.call(automatic.start(), automatic.place(automatic.batches[0]))
    ours = [state_stages(to_host(TrainState(automatic.start(), 0, 0))), state_stages(to_host(TrainState(learned, 1, config.batch_size)))]
    old, reference, *noise = ([{name: leaf for name, leaf in step.items() if name in ours[1]} for step in trace] for trace in traces)
    comparison = run.Bound(reference, noise, old[1]["parameters/conv_spatial/w"].dtype).judge(old, ours)
    if not comparison.equal:
        raise UnequalWork(f"jit against one device: {comparison.verdict()}")


def in_another_order(side, batch_size: int, seed: int):
    """The side with the rows of every batch in another order: on one device nothing but the order of sums changes."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(batch_size)

    def chunks(current):
        for chunk in side.chunks(current):
            yield [{key: value[order] for key, value in batch.items()} for batch in chunk]

    return side._replace(chunks=chunks)


def words_of(name: str, value) -> list[str]:
    from kgo_shard.config import flag_of

    if value is True:
        return [flag_of(name)]
    return [] if value is False else [flag_of(name), str(value)]
