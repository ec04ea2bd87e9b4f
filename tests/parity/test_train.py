"""Both trainers print the same text, save at the same moments and leave the same meta, from the same command lines.

The loop is run with a step that costs nothing but tells every row that it is given, in its place, and under a clock that only
the run moves: then the times are equal too. At the end stands a real run of both, with the times removed.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import re
import shutil
from types import SimpleNamespace

import jax
import legacy_pmap
import numpy as np
import pytest
from legacy_pmap.optim import learning_rate as old_learning_rate

import kgo_shard
from kgo_shard import augment, batches, checkpoint, journal
from kgo_shard.optim import learning_rate as new_learning_rate

from ..test_train import words_of

OLD, NEW = (importlib.import_module(f"{stack.__name__}.train") for stack in (legacy_pmap, kgo_shard))
BASE = dict(pos_len=9, batch_size=32, model_kind="b2c32", compute_dtype="float32", print_every=1, max_val_batches=1)
ARRAYS = {  # what a fake step's metric tells of
    "loss": "binaryInputNCHW",
    "p0loss": "policyTargetsNCMove",
    "vloss": "globalTargetsNC",
    "oloss": "valueTargetsNCHW",
    "skloss": "globalInputNC",
    "pacc1": "scoreDistrN",
}
expand = jax.jit(augment.expand, static_argnames="pos_len")


@functools.cache
def weights(shape) -> np.ndarray:
    return np.random.default_rng(0).random(shape)


def figures(batch) -> dict[str, float]:
    """Metrics that change with any row, its place, its board's symmetry and its history."""
    arrays = {name: np.asarray(batch[key], np.float64) for name, key in ARRAYS.items()}
    arrays["vloss"] = arrays["vloss"][:, :41]  # further columns hold numbers as large as time stamps
    found = {name: float(np.vdot(weights(array.shape), array)) for name, array in arrays.items()}
    return found | {"wsum": 3.0, "grad_norm": found["loss"] / 7}


class Clock:
    """A batch takes 0.125 s to read, a call 2 s to submit and 4 s to finish."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def slow_reader(self, original):
        def read(*arguments, **keywords):
            for batch in original(*arguments, **keywords):
                self.now += 0.125
                yield batch

        return read

    def fake_step(self, config, rate, as_arrays):
        def step(state, batches, submitted=None):
            self.now += 2
            if submitted is not None:
                submitted(None)
            sums = dict.fromkeys(figures(as_arrays(batches[0])), 0.0)
            for batch in batches:
                sums = {name: total + sums[name] for name, total in figures(as_arrays(batch)).items()}
            counts = dict(step=state.step + len(batches), samples=state.samples + len(batches) * config.batch_size)
            state = state._replace(**counts) if hasattr(state, "_replace") else dataclasses.replace(state, **counts)
            return state, sums | {"lr": rate(state.step - 1)}

        return step

    def wait(self, outputs):
        self.now += 4


def noted(save, samples_at):
    """Every save shows in what the run prints."""

    def saved(*arguments):
        print(f"SAVE {samples_at(arguments)}")
        save(*arguments)

    return saved


@pytest.fixture
def fakes(monkeypatch):
    """Puts the step that costs nothing, and a clock, into both trainers."""

    def reset():
        for module, read, rate, as_arrays in (
            (OLD, "read_batches", lambda config: lambda step: old_learning_rate(step, config), lambda batch: batch),
            (NEW, "read_packed_batches", lambda config: lambda step: new_learning_rate(config, step), lambda batch: expand(batch, pos_len=9)),
        ):
            clock = Clock()
            timing = journal if module is NEW else module
            monkeypatch.setattr(timing, "time", clock)
            monkeypatch.setattr(timing, "jax", SimpleNamespace(block_until_ready=clock.wait))
            monkeypatch.setattr(module, read, clock.slow_reader(originals[module]))
            if module is NEW:
                monkeypatch.setattr(NEW, "keep_compiled", lambda config: None)  # nothing is compiled
                monkeypatch.setattr(batches, read, getattr(module, read))  # of validations
            make_step = lambda config, clock=clock, rate=rate, as_arrays=as_arrays: clock.fake_step(config, rate(config), as_arrays)  # noqa: E731
            monkeypatch.setattr(module, "make_train_step", make_step)
            monkeypatch.setattr(module, "make_eval_step", lambda config, as_arrays=as_arrays: lambda state, batch: figures(as_arrays(batch)))

    originals = {OLD: OLD.read_batches, NEW: NEW.read_packed_batches}
    monkeypatch.setattr(OLD, "save_checkpoint", noted(OLD.save_checkpoint, lambda arguments: arguments[1].samples))
    monkeypatch.setattr(checkpoint, "save_checkpoint", noted(checkpoint.save_checkpoint, lambda arguments: arguments[1].samples))
    return reset


def run(module, folder, data, runs) -> dict:
    """What the command lines `runs` print, one after the other in one folder, and what they leave there."""
    out, err, codes = io.StringIO(), io.StringIO(), []
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for options in runs:
            own = {"checkpoint_format": "legacy"} if module is NEW else {}
            codes.append(module.main(words_of(**BASE | options | own, traindir=folder, datadir=data)))
    path = folder / checkpoint.FILE_NAME
    text = out.getvalue().replace(str(folder), "RUN")
    return {"out": text.splitlines(), "err": err.getvalue(), "codes": codes, "meta": checkpoint.read_pickle(path)["meta"] if path.exists() else None}


def run_both(fakes, tmp_path, data, *runs) -> dict:
    """Both trainers' runs, equal in everything; one of the two."""
    fakes()
    old, new = (run(module, tmp_path / module.__name__, data, runs) for module in (OLD, NEW))
    assert old.pop("out") == (out := new.pop("out"))
    assert old == new
    old["out"] = out
    assert old["codes"] == [0] * len(runs)
    return old


def starts(found) -> list[str]:
    """The words that tell which line it is."""
    return [re.match(r"step=\d+|  VAL \[\d+|SAVE \d+|resumed|STEP_TIME: step=\d+", line)[0].strip() for line in found["out"]]


# Marks, windows, chunks


def test_a_plain_run(fakes, tmp_path, rows9):
    found = run_both(fakes, tmp_path, rows9, dict(max_training_samples=200, print_every=3))
    # 200 rows are 7 batches; the seventh step's window is not full.
    assert starts(found) == ["step=3", "step=6", "VAL [224", "SAVE 224"]
    assert found["meta"]["samples"] == 224


def test_several_marks_in_one_call_windows_across_calls_and_a_short_last_call(fakes, tmp_path, rows9):
    options = dict(steps_per_jit=4, print_every=3, val_every_samples=48, save_every_samples=40, max_training_samples=11 * 32)
    found = run_both(fakes, tmp_path, rows9, options)
    # Calls of 4, 4 and 3 steps: the second one passes the marks 144, 192, 240 and 160, 200, 240 at once.
    assert starts(found) == [
        "step=4", "VAL [128", "SAVE 128", "step=8", "VAL [256", "SAVE 256", "step=11", "VAL [352", "SAVE 352",
    ]  # fmt: skip


def test_epochs_end_within_calls(fakes, tmp_path, rows9):
    options = dict(steps_per_jit=5, print_every=4, val_every_samples=80, save_every_samples=80, max_training_samples=28 * 32 - 7, log_step_time=True)
    found = run_both(fakes, tmp_path, rows9, options)
    # An epoch is 12 batches: 5, 5, 2, then 5, 5, 2, then 4.
    steps = [line for line in starts(found) if line.startswith("step=")]
    assert steps == ["step=5", "step=10", "step=17", "step=22", "step=28"]
    # 384 passes no mark after 320; 544 passes two, 768 one after 704, the end is none.
    assert [line for line in starts(found) if line.startswith("VAL")] == [f"VAL [{n}" for n in (160, 320, 544, 704, 768, 896)]
    assert [line for line in starts(found) if line.startswith("SAVE")] == [f"SAVE {n}" for n in (160, 320, 544, 704, 768, 896)]
    times = [line for line in found["out"] if line.startswith("STEP_TIME")]
    assert times[1] == "STEP_TIME: step=10, steps=5, data=0.1250s, host_submit=0.4000s, train_wait=0.8000s, total=1.3250s"
    assert times[2].startswith("STEP_TIME: step=17, steps=7, data=0.1250s, host_submit=0.5714s")
    assert times[4].startswith("STEP_TIME: step=28, steps=6, data=0.1250s, host_submit=0.6667s")


def test_marks_that_fall_on_the_end_do_not_come_twice(fakes, tmp_path, rows9):
    found = run_both(fakes, tmp_path, rows9, dict(val_every_samples=64, save_every_samples=64, max_training_samples=128))
    assert starts(found)[-3:] == ["step=4", "VAL [128", "SAVE 128"]


def test_no_final_save(fakes, tmp_path, rows9):
    runs = [dict(max_training_samples=96, no_final_save=True), dict(max_training_samples=96, no_final_save=True, save_every_samples=64)]
    found = run_both(fakes, tmp_path, rows9, *runs)
    # The first leaves nothing to resume from, the second only its mark.
    assert starts(found) == ["step=1", "step=2", "step=3", "VAL [96", "step=1", "step=2", "SAVE 64", "step=3", "VAL [96"]
    assert found["meta"]["samples"] == 64


def test_resume_finished_runs_and_no_resume(fakes, tmp_path, rows9):
    runs = [dict(max_training_samples=samples) for samples in (96, 160, 160, 32)]
    runs += [dict(max_training_samples=64, no_resume=True, no_final_save=True), dict(max_training_samples=192, save_every_samples=48)]
    found = run_both(fakes, tmp_path, rows9, *runs)
    assert starts(found) == [
        "step=1", "step=2", "step=3", "VAL [96", "SAVE 96",
        "resumed", "step=4", "step=5", "VAL [160", "SAVE 160",
        "resumed",  # finished: nothing to do, nothing written
        "resumed",
        "step=1", "step=2", "VAL [64",
        "resumed", "step=6", "VAL [192", "SAVE 192",
    ]  # fmt: skip


# What is printed and recorded


@pytest.mark.parametrize(
    "options",
    [
        dict(log_grad_norm=True),
        dict(grad_clip_norm=0.5, lr_schedule="constant", lr=3e-3, wd=0),
        dict(xla_peak_tflops=0, warmup_samples=64, seed=3),
        dict(log_grad_norm=True, max_val_batches=0, enable_history_matrices=True, print_every=3),  # sums of 3: no exact halves
        dict(log_step_time=True, steps_per_jit=3, print_every=2),
        dict(optimizer="muon", muon_target="attn", muon_polar_steps=3, muon_row_split_size=16, muon_group_blocks=False),
        dict(optimizer="sgd", scan_blocks=True, fuse_projections=True, remat_blocks=True, attention_impl="xla"),
        dict(optimizer="none", stack_blocks=True, loss_profile="policy_only", separate_projections=True),
        dict(int8_target="all", int8_fwd_bits=4, ema_decay=0.5, activation_dtype="bf16", donate_train_buffers=True),
    ],
)
def test_options_that_show_in_lines_or_meta(fakes, tmp_path, rows9, options):
    found = run_both(fakes, tmp_path, rows9, dict(max_training_samples=192) | options)
    assert sum(line.startswith("step=") for line in found["out"]) >= 2
    assert all(found["meta"][name] == value for name, value in options.items() if name in found["meta"])


def test_every_symmetry_type(fakes, tmp_path, rows9):
    printed = {}
    for symmetry in ("xyt", "x", "xy", "x+y", "t", "all", "none"):
        options = dict(symmetry_type=symmetry, max_training_samples=14 * 32, steps_per_jit=3, print_every=3)
        found = run_both(fakes, tmp_path / symmetry, rows9, options)
        assert starts(found) == ["step=3", "step=6", "step=9", "step=12", "VAL [448", "SAVE 448"]
        printed[symmetry] = tuple(found["out"])
    assert len(set(printed.values())) == 7  # each draws images of its own, and the lines show it


def test_small_boards_train_alike_where_they_are_allowed_and_are_refused_by_the_new_stack_alone(fakes, tmp_path, rows9):
    """The original warns and trains on; here --allow-nonfull-mask has to say that this is meant, and then it is told once."""
    with np.load(rows9 / "train" / "data0.npz") as file:
        rows = {key: file[key][:96] for key in file.files}
    rows["binaryInputNCHWPacked"][70:, 0, 0] &= 0x7F  # the first point of the third batch's boards is off the board
    for part in ("train", "val"):
        (tmp_path / "data" / part).mkdir(parents=True)
        np.savez(tmp_path / "data" / part / "rows.npz", **rows)
    fakes()
    options = dict(max_training_samples=192)
    found = run(OLD, tmp_path / "a", tmp_path / "data", [options])
    assert found["err"] == "warning: rows with boards smaller than pos_len; --allow-nonfull-mask silences this\n" and found["codes"] == [0]
    found = run(NEW, tmp_path / "a", tmp_path / "data", [options])
    assert "row 70 has a board smaller than pos_len" in found["err"] and found["codes"] == [2]
    fakes()
    old, new = (run(module, tmp_path / module.__name__, tmp_path / "data", [options | dict(allow_nonfull_mask=True)]) for module in (OLD, NEW))
    assert (old.pop("err"), new.pop("err").count("boards smaller than pos_len")) == ("", 1)
    assert old == new and old["codes"] == [0]


# Where the rows lie


LAYOUTS = {
    "flat": (["b.npz", "a.npz"], None),
    "index": (
        ["z/a.npz", "z/b.npz", "y/a.npz", "y/b.npz", "x/a.npz", "x/left-out.npz", "x/a.txt"],
        ["z/b.npz", {"name": "z/a.npz"}, {"path": "y/a.npz"}, {"file": "y/b.npz"}, {"filename": "./x/a.npz", "rows": 5}, "x/a.txt"],
    ),
    "index with holes": (["a/1.npz", "a/2.npz"], ["a/2.npz", "gone.npz", {"rows": 5}, None, 7, {"name": None}]),
    "index with an absolute name": (["far/1.npz", "a/2.npz"], ["ABSOLUTE/far/1.npz", "a/2.npz"]),
    "index that names nothing": (["a/1.npz", "deep/er/2.npz"], ["gone.npz"]),
    "index beside files": (["a.npz", "sub/b.npz"], ["sub/b.npz"]),
    "nested": (["b/1.npz", "a-b/2.npz", "a/3.npz", "a/deep/4.npz", "a.b/5.npz"], None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_and_indices(fakes, tmp_path, rows9, layout):
    names, entries = LAYOUTS[layout]
    folder = tmp_path / "data" / "train"
    with np.load(rows9 / "train" / "data0.npz") as file:
        rows = {key: file[key] for key in file.files}
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / name, "wb") as file:
            np.savez(file, **{key: value[32 * i : 32 * i + 32] for key, value in rows.items()})  # every file has rows of its own
    if entries is not None:
        (folder / "index.json").write_text(json.dumps({"files": entries}).replace("ABSOLUTE", str(folder)))
    shutil.copytree(rows9 / "val", tmp_path / "data" / "val")
    # Two epochs, in different orders.
    found = run_both(fakes, tmp_path, tmp_path / "data", dict(max_training_samples=2 * 32 * len(names)))
    assert sum(line.startswith("step=") for line in found["out"]) == 2 * len(names)


@pytest.mark.parametrize("text", ["{", "[]", '{"files": "a.npz"}'])
def test_a_broken_index_is_refused_by_both(tmp_path, text):
    for part in ("train", "val"):
        (tmp_path / "data" / part).mkdir(parents=True)
        (tmp_path / "data" / part / "index.json").write_text(text)
    for module in (OLD, NEW):
        found = run(module, tmp_path / "run", tmp_path / "data", [{}])
        assert found["codes"] == [2] and found["out"] == [] and "train/index.json" in found["err"] and found["err"].count("\n") == 1


# The real thing


@pytest.mark.long
def test_real_runs_print_the_same_lines_but_for_the_times(tmp_path, rows9):
    """Two steps, then two more after a resume; the programs are those of test_profile.py."""
    runs = [dict(max_training_samples=samples, print_every=2, log_step_time=True, donate_train_buffers=True) for samples in (64, 128)]
    old, new = (run(module, tmp_path / module.__name__, rows9, runs) for module in (OLD, NEW))
    for found in (old, new):
        found["out"] = [re.sub(r"\b(time|sps|TFLOPS|MFU|data|host_submit|train_wait|total)=[\d.]+(s|%)?", r"\1", line) for line in found["out"]]
        assert starts(found) == ["step=2", "STEP_TIME: step=2", "VAL [64", "resumed", "step=4", "STEP_TIME: step=4", "VAL [128"]
    assert old == new
    assert old["out"][1] == "STEP_TIME: step=2, steps=2, data, host_submit, train_wait, total"
