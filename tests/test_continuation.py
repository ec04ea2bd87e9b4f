"""A run that is killed at any moment and started again with the same command ends as one that was never killed."""

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kgo_shard import store
from kgo_shard.batches import Place, find_files, read_packed_batches
from kgo_shard.checkpoint import load_checkpoint
from kgo_shard.config import Config
from kgo_shard.journal import LOG, METRICS
from kgo_shard.state import to_host
from kgo_shard.train import train

from .test_train import words_of

train_module = importlib.import_module("kgo_shard.train")
KILLS = 25
OPTIONS = {
    "pos_len": 9, "batch_size": 16, "model_kind": "b2c32", "max_training_samples": 60 * 16, "warmup_samples": 64, "print_every": 7,
    "save_every_samples": 16, "val_every_samples": 20 * 16, "max_val_batches": 2, "ema_decay": 0.9, "enable_history_matrices": True,
    "compute_dtype": "float32", "steps_per_jit": 1, "log_grad_norm": True,
}  # fmt: skip


def start(traindir, data, cache, **options) -> subprocess.Popen:
    """`kgo-shard train` in a process of its own, in exact mode as the tests are."""
    command = [sys.executable, "-m", "kgo_shard", "train", *words_of(**OPTIONS | options, traindir=traindir, datadir=data)]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def figures(lines) -> dict[str, str]:
    """The log's figures by their step, without the times; a line that was printed again replaces the one before."""
    kept = {}
    for line in lines:
        if line.startswith(("step=", "  VAL")):
            text = re.sub(r", (time|sps|TFLOPS|MFU)=[^,]*", "", line)
            kept[text.split(",")[0].split(":")[0]] = text
    return kept


def logged(traindir) -> list[dict]:
    """The figures in the run folder, all of them and in full, without the times."""
    lines = [json.loads(line) for line in (traindir / METRICS).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "sps", "tflops", "mfu")} for line in lines]


def last_state(traindir) -> dict[str, np.ndarray]:
    return to_host(load_checkpoint(traindir, Config(**OPTIONS)))


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].tobytes() != b[name].tobytes() or a[name].dtype != b[name].dtype] == []


@pytest.mark.long
def test_killed_at_any_moment_it_ends_as_if_it_had_not_been(tmp_path, rows9):
    """Every step is saved, so that many kills fall into a save. Steps enough that a quick machine does not end before the last kill."""
    options = {"max_training_samples": 240 * 16}
    whole = start(tmp_path / "whole", rows9, tmp_path / "cache", **options)
    expected = figures(whole.communicate(timeout=600)[0].splitlines())
    assert whole.returncode == 0 and len(expected) == 240 // 7 + 240 // 20
    rng, lines, kills, unfinished = random.Random(0), [], 0, 0
    while True:
        run = start(tmp_path / "killed", rows9, tmp_path / "cache", **options)
        reached = time.monotonic() + 300
        if kills < KILLS:
            before = set(store.complete(tmp_path / "killed" / store.FOLDER))
            # One more step at least, or the run would never end; then any moment.
            while set(store.complete(tmp_path / "killed" / store.FOLDER)) <= before and run.poll() is None:
                assert time.monotonic() < reached
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.4))
            run.send_signal(signal.SIGKILL)
        lines += run.communicate(timeout=600)[0].splitlines()
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, lines[-3:]
        kills += 1
        unfinished += any((tmp_path / "killed" / store.FOLDER).glob("*.tmp"))
    assert kills == KILLS and unfinished > 0, "no kill fell into a save"
    assert_same_bits(last_state(tmp_path / "whole"), last_state(tmp_path / "killed"))
    assert last_state(tmp_path / "killed")["step"] == 240 and figures(lines) == expected
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole"), "each once, in order, as if nothing had happened"
    assert figures((tmp_path / "killed" / LOG).read_text().splitlines()) == expected


def stopped_run(traindir, data, after: int, **options):
    """A run that SIGTERM reaches during its step `after`; its lines."""
    lines, plain = [], train_module.make_train_step

    def make_train_step(config):
        step = plain(config)

        def stopping(state, batches, **keywords):
            if state.step + 1 == after:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(state, batches, **keywords)

        return stopping

    train_module.make_train_step = make_train_step
    try:
        train(Config(**OPTIONS | options, traindir=traindir, datadir=data), log=lines.append)
    finally:
        train_module.make_train_step = plain
    return lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rows9):
    """(folder, lines) of a run that nothing stops: two and a half epochs."""
    folder, lines = tmp_path_factory.mktemp("whole"), []
    train(Config(**OPTIONS | {"save_every_samples": 0}, traindir=folder, datadir=rows9), log=lines.append)
    return folder, lines


@pytest.mark.parametrize("after", [10, 24, 47])  # in the middle of an epoch, at its end, and after it
def test_sigterm_finishes_the_step_saves_and_goes_on_exactly(whole, tmp_path, rows9, after):
    """Nothing but the stop saves here."""
    lines = stopped_run(tmp_path, rows9, after, save_every_samples=0)
    assert lines[-1].startswith(f"stopped by SIGTERM after step {after}: saved in {tmp_path}")
    assert [path.name for path in store.complete(tmp_path / store.FOLDER)] == [f"{after:08d}"]
    train(Config(**OPTIONS | {"save_every_samples": 0}, traindir=tmp_path, datadir=rows9), log=lines.append)
    assert_same_bits(last_state(whole[0]), last_state(tmp_path))
    assert figures(lines) == figures(whole[1])


def test_the_originals_order_begins_another_epoch(whole, tmp_path, rows9):
    stopped_run(tmp_path, rows9, 10, save_every_samples=0)
    train(Config(**OPTIONS | {"save_every_samples": 0}, traindir=tmp_path, datadir=rows9, resume_order="legacy"), log=lambda line: None)
    ours, other = last_state(whole[0]), last_state(tmp_path)
    assert ours["step"] == other["step"] and (ours["params/conv_spatial/w"] != other["params/conv_spatial/w"]).any()


@pytest.mark.long
def test_another_number_of_devices_loads_the_same_bits_and_the_same_rows(tmp_path, rows9):
    """8 to 4 to 16 to 1."""
    options, taken, before = {"save_every_samples": 0, "max_training_samples": 8 * 16}, [], None
    plain = train_module.make_train_step

    def make_train_step(config):
        step = plain(config)

        def noted(state, batches, **keywords):
            taken.append((to_host(state), [batch["globalInputNC"].tobytes() for batch in batches]))
            return step(state, batches, **keywords)

        return noted

    train_module.make_train_step = make_train_step
    try:
        for devices, after in ((8, 2), (4, 4), (16, 6), (1, 8)):
            parallel = {"data_parallel": devices > 1, "data_parallel_devices": devices if devices > 1 else 0}
            lines = stopped_run(tmp_path, rows9, after, **options | parallel)
            saved = last_state(tmp_path)
            assert saved["step"] == after
            if devices != 8:
                assert_same_bits(before, taken[-2][0])
                assert any("each device's seki weight comes from its own rows" in line for line in lines)
            before = saved
    finally:
        train_module.make_train_step = plain
    stream = read_packed_batches(epoch_of(rows9), Config(**OPTIONS), 1234)
    assert [rows for _, rows in taken] == [[next(stream)["globalInputNC"].tobytes()] for _ in range(8)]


def epoch_of(data):
    place = Place()
    place.begin(find_files(data / "train"), 1234)
    return place.order
