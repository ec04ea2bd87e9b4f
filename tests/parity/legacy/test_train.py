"""The trainer: log, marks, short last chunk, resume, and nothing written when the inputs are bad."""

import os
import pickle
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import legacy_pmap as stack

from .helpers import DATA, FILES, first_batches, small_config

LINE = (r"step=\d+, samples=\d+, time=[\d.]+s, lr=\d\.\d\de-\d\d, wd=0\.1000, loss=[\d.]+, p0loss=[\d.]+, vloss=[\d.]+, oloss=[\d.]+, "
        r"skloss=[\d.]+, pacc1=[\d.]+, grad_norm=[\d.]+, sps=[\d.]+, TFLOPS=[\d.]+, MFU=[\d.]+%")


def run_config(tmp_path, **options):
    return small_config(**{**dict(traindir=str(tmp_path / "out"), datadir=str(DATA), print_every=1, max_val_batches=1), **options})


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_log_marks_and_short_last_chunk(tmp_path, capsys):
    config = run_config(tmp_path, steps_per_jit=2, max_training_samples=80, print_every=2, val_every_samples=32)
    state = stack.train(config)
    lines = lines_of(capsys)
    assert (state.step, state.samples) == (5, 80)
    steps = [line for line in lines if line.startswith("step=")]
    assert all(re.fullmatch(LINE, line) for line in steps) and [line.split(",")[0] for line in steps] == ["step=2", "step=4"]
    assert [line.split(":")[0] for line in lines if "VAL" in line] == [f"  VAL [{n} samples]" for n in (32, 64, 80)]
    with open(tmp_path / "out" / "checkpoint_jax.pkl", "rb") as file:
        assert pickle.load(file)["meta"]["step"] == 5
    assert os.listdir(tmp_path / "out") == ["checkpoint_jax.pkl"]


def test_step_times_are_means_over_the_windows_steps(tmp_path, capsys, monkeypatch):
    """Under a clock that only the run moves: 0.5 s to read a batch, 4 s to submit a call, 8 s to wait for it."""
    module, now = sys.modules["legacy_pmap.train"], [0.0]

    def take(seconds):
        now[0] += seconds

    def make_train_step(config):
        def step(state, batches, submitted=None):
            take(4)
            if submitted is not None:
                submitted(None)
            metrics = dict.fromkeys((*stack.METRICS, "grad_norm", "lr"), 1.0)
            return state._replace(step=state.step + len(batches), samples=state.samples + len(batches) * config.batch_size), metrics

        return step

    def read_batches(*arguments):
        for batch in stack.read_batches(*arguments):
            take(0.5)
            yield batch

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module, "jax", SimpleNamespace(block_until_ready=lambda outputs: take(8)))
    monkeypatch.setattr(module, "make_train_step", make_train_step)
    monkeypatch.setattr(module, "make_eval_step", lambda config: lambda state, batch: dict.fromkeys(stack.METRICS, 1.0))
    monkeypatch.setattr(module, "read_batches", read_batches)
    # Calls of 2, 2 and 1 steps, which a validation interrupts.
    options = dict(steps_per_jit=2, max_training_samples=80, val_every_samples=32, no_final_save=True)
    stack.train(run_config(tmp_path, log_step_time=True, **options))
    lines = lines_of(capsys)
    assert [line for line in lines if line.startswith("STEP_TIME")] == [
        "STEP_TIME: step=2, steps=2, data=0.5000s, host_submit=2.0000s, train_wait=4.0000s, total=6.5000s",
        "STEP_TIME: step=4, steps=2, data=0.5000s, host_submit=2.0000s, train_wait=4.0000s, total=6.5000s",
        "STEP_TIME: step=5, steps=1, data=0.5000s, host_submit=4.0000s, train_wait=8.0000s, total=12.5000s"]
    assert lines[0].startswith("step=2,") and lines[1].startswith("STEP_TIME: step=2,") and "VAL [32" in lines[2]
    # Without the option nothing is waited for: 1 s to read, 4 s to submit.
    stack.train(run_config(tmp_path, **options))
    lines = lines_of(capsys)
    assert not any("STEP_TIME" in line for line in lines) and "time=5.0s" in lines[0]


def test_the_step_shows_its_outputs_before_it_waits(tmp_path):
    config, seen = small_config(), []
    state, metrics = stack.make_train_step(config)(stack.init_state(config), first_batches(config, 1), submitted=seen.append)
    [(carry, vector, norm)] = seen
    assert carry is state.carry and float(norm) == metrics["grad_norm"] and float(vector[0]) == metrics["loss"]


def test_epochs_follow_the_step(tmp_path, monkeypatch):
    """An epoch is 4 batches of 96 (192 + 192 rows); the second is shuffled with the step it starts at."""
    config = run_config(tmp_path, batch_size=96, max_training_samples=96 * 6, no_final_save=True)
    seen = []

    def read_batches(files, config, seed):
        seen.append((list(files), seed))
        return stack.read_batches(files, config, seed)

    monkeypatch.setattr(sys.modules["legacy_pmap.train"], "read_batches", read_batches)
    stack.train(config)
    expected = []
    for step in (0, 4):
        order = sorted(FILES)
        np.random.default_rng(1234 + step).shuffle(order)
        expected.append(([os.path.basename(path) for path in order], 1234 + step))
    training = [(list(map(os.path.basename, files)), seed) for files, seed in seen if len(files) > 1]
    assert training == expected
    assert seen[-1][1] == 1234 + 576 + 999983
    assert not os.path.exists(tmp_path / "out" / "checkpoint_jax.pkl")


def test_resume_continues_and_refuses(tmp_path, capsys):
    stack.train(run_config(tmp_path, max_training_samples=32))
    lines_of(capsys)
    state = stack.train(run_config(tmp_path, max_training_samples=64))
    lines = lines_of(capsys)
    assert state.step == 4 and any(line.startswith("resumed from") and line.endswith(": step 2, 32 samples") for line in lines)
    before = (tmp_path / "out" / "checkpoint_jax.pkl").read_bytes()
    with pytest.raises(stack.CheckpointError, match="muon_target.*ffn"):
        stack.train(run_config(tmp_path, max_training_samples=96, muon_target="ffn"))
    assert (tmp_path / "out" / "checkpoint_jax.pkl").read_bytes() == before
    assert stack.train(run_config(tmp_path, max_training_samples=16, no_resume=True)).step == 1


@pytest.mark.parametrize("options, error", [
    (dict(datadir="/nowhere"), "no such folder"), (dict(pos_len=19), "pos_len=19"), (dict(batch_size=4096), "4096 rows")])
def test_bad_inputs_write_nothing(tmp_path, options, error):
    with pytest.raises(stack.DataError, match=error):
        stack.train(run_config(tmp_path, **options))
    assert os.listdir(tmp_path) == []


def test_directories_are_required():
    with pytest.raises(ValueError, match="traindir"):
        stack.train(small_config(datadir=str(DATA)))


def test_main_exit_codes(tmp_path, capsys):
    flags = ["--traindir", str(tmp_path / "out"), "--datadir", "/nowhere", "--pos-len", "9", "--model-kind", "b2c32"]
    assert stack.main(flags) == 2
    error = capsys.readouterr().err
    assert "/nowhere" in error and error.count("\n") == 1 and os.listdir(tmp_path) == []
