"""The trainer: log, marks, short last chunk, resume, and nothing written when the inputs are bad."""

import os
import pickle
import re
import sys

import numpy as np
import pytest

import legacy_pmap as stack

from .helpers import DATA, FILES, small_config

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
    assert state.step == 4 and any("resumed" in line and "step=2" in line for line in lines)
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
