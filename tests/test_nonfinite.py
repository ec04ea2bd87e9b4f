"""A step whose loss or gradient is not finite: it stops the run before anything is overwritten, or is dropped and counted."""

import json
import os
import shutil

import numpy as np
import pytest

from kgo_shard import nonfinite, step, store
from kgo_shard.__main__ import main as kgo_shard_main
from kgo_shard.batches import find_files, read_packed_batches
from kgo_shard.checkpoint import load_checkpoint
from kgo_shard.config import Config
from kgo_shard.layout import Column
from kgo_shard.nonfinite import Finding, find_first
from kgo_shard.state import init_state, to_host
from kgo_shard.step import NonfiniteError, make_train_step
from kgo_shard.train import main

from .test_continuation import assert_same_bits, train_module
from .test_npz import TARGETS, read
from .test_train import OPTIONS, words_of

# test_train.py's program on 8 devices; here in the own format.
SMALL = OPTIONS | {"checkpoint_format": "orbax", "max_training_samples": 12 * 16, "print_every": 1, "max_val_batches": 1, "save_every_samples": 16}
SMALL |= {"check_replicas": 2}  # an option that the old stack does not know


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory, rows9):
    """Real rows in two files, one of which has a row, the 40th, whose weight takes every term out of float32."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(rows9 / "val", folder / "val")
    (folder / "train").mkdir()
    rows = {key: value[:96] for key, value in read(rows9 / "train" / "data0.npz").items()}
    np.savez(folder / "train" / "good.npz", **rows)
    targets = rows[TARGETS].copy()
    targets[39, Column.row_weight] = 3e38
    np.savez(folder / "train" / "spoiled.npz", **rows | {TARGETS: targets})
    return folder


def batches(folder, count, config):
    stream = read_packed_batches(find_files(folder / "train"), config, 0)
    return [next(stream) for _ in range(count)]


# Where it stops


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, spoiled):
    """(run folder, exit code, the line on stderr) of a run into the spoiled row."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", lambda *words, file=None, **_: said.append(" ".join(map(str, words))) if file else None)
        code = main(words_of(**SMALL, traindir=folder, datadir=spoiled))
    return folder, code, said


def test_the_run_stops_and_names_step_term_device_and_rows(stopped, spoiled):
    folder, code, said = stopped
    assert code == 1 and len(said) == 1
    [tape] = (folder / nonfinite.FOLDER).iterdir()
    step = int(tape.name)
    # Row 39 is the eighth of the file's third batch (32 to 47): on device 3, whose rows are 38 and 39.
    assert f"error: step {step}: loss term" in said[0] and "on device 3 is not finite, from rows 38 to 39 of" in said[0]
    assert str(spoiled / "train" / "spoiled.npz") in said[0] and str(tape) in said[0] and "\n" not in said[0]


def test_nothing_that_was_saved_is_touched_and_what_is_saved_is_finite(stopped):
    folder, *_ = stopped
    [tape] = (folder / nonfinite.FOLDER).iterdir()
    saved = load_checkpoint(folder, Config(**SMALL))
    assert saved.step == int(tape.name) - 1
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in to_host(saved).values())


@pytest.mark.parametrize("side", ["new", pytest.param("old", marks=pytest.mark.long)])
def test_its_tape_is_reproduced_by_replay_also_from_another_place(stopped, tmp_path, capsys, side):
    folder, *_ = stopped
    [tape] = (folder / nonfinite.FOLDER).iterdir()
    shutil.copytree(tape, tmp_path / "tape")
    facts = json.loads((tape / nonfinite.FACTS).read_text())
    if side == "old":
        pytest.importorskip("legacy_pmap", reason="the old stack was deleted")
    assert kgo_shard_main(["replay", str(tmp_path / "tape"), "--side", side, "--report", str(tmp_path / "report")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert " REPRODUCED: loss term" in out and facts["first"]["name"] in out and "rows [32, 47] of" in out
    assert "REPRODUCED" in (tmp_path / "report" / "report.html").read_text()


def test_replay_says_where_the_step_is_finite_or_another_term_is_not(stopped, tmp_path, capsys):
    folder, *_ = stopped
    [tape] = (folder / nonfinite.FOLDER).iterdir()
    shutil.copytree(tape, tmp_path / "other")
    facts = json.loads((tape / nonfinite.FACTS).read_text())
    (tmp_path / "other" / nonfinite.FACTS).write_text(json.dumps(facts | {"first": {"name": "loss_terms/p0loss", "devices": [0]}}))
    assert kgo_shard_main(["replay", str(tmp_path / "other"), "--side", "new"]) == 1
    assert "OTHERWISE: loss term" in " ".join(capsys.readouterr().out.split())
    rows = tmp_path / "other" / "train" / nonfinite.ROWS
    targets = read(rows)[TARGETS]
    targets[:, Column.row_weight] = 1
    np.savez(rows, **read(rows) | {TARGETS: targets})
    assert kgo_shard_main(["replay", str(tmp_path / "other"), "--side", "new"]) == 1
    assert "NOT REPRODUCED: every term and every gradient of the step is finite here" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "other" / nonfinite.FACTS).write_text("{}")
    assert kgo_shard_main(["replay", str(tmp_path / "other"), "--side", "new"]) == 2
    assert nonfinite.FACTS in capsys.readouterr().err


def test_a_tape_that_cannot_be_made_does_not_hide_the_error(spoiled, tmp_path):
    config = Config(**SMALL, traindir=tmp_path, datadir=spoiled)
    (tmp_path / nonfinite.FOLDER).write_text("in the way")
    state = init_state(config)
    error = nonfinite.explain(NonfiniteError(state, {}, 0), batches(spoiled, 1, config)[0], (spoiled / "train" / "good.npz", 0), config)
    assert "step 1:" in str(error) and "Its tape could not be made" in str(error) and "rows 0 to 15" in str(error)


# What is first


def test_the_first_is_a_term_then_the_loss_then_a_gradient_then_the_norm():
    stages = {
        "norm": np.float32(np.inf),
        "reduced_gradient/a": np.array([1.0, np.nan]),
        "raw_gradient/b": np.array([[1.0, 1.0], [1.0, np.inf]]),
        "loss_terms/loss": np.array([np.nan, 1.0]),
        "loss_terms/vloss": np.array([1.0, np.nan]),
    }
    found = []
    while first := find_first(stages):
        found.append(first)
        stages[first.name] = np.zeros_like(stages[first.name])
    assert found == [
        Finding("loss_terms/vloss", [1]), Finding("loss_terms/loss", [0]), Finding("raw_gradient/b", [1]), Finding("reduced_gradient/a", []),
        Finding("norm", []),
    ]  # fmt: skip


# The step itself


@pytest.fixture(scope="module")
def three(spoiled):
    """(config, four batches of which the third is spoiled): one device."""
    config = Config(**SMALL | {"data_parallel": False, "data_parallel_devices": 0, "donate_train_buffers": False})
    stream = read_packed_batches([spoiled / "train" / "spoiled.npz"], config, 0)
    return config, [next(stream) for _ in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("donate", [False, True])
def test_a_call_of_several_steps_stops_before_the_bad_one(three, donate):
    """Also where the state before was donated: the device itself keeps it."""
    config, rows = three
    config = config.replace(donate_train_buffers=donate, steps_per_jit=4)
    with pytest.raises(NonfiniteError, match="step 3: its loss or its gradient is not finite") as stop:
        make_train_step(config)(init_state(config), rows)
    two, metrics = make_train_step(config)(init_state(config), rows[:2])
    assert stop.value.index == 2 and stop.value.state.step == 2 and stop.value.state.samples == 32
    assert_same_bits(to_host(stop.value.state), to_host(two))
    assert {name: value for name, value in stop.value.metrics.items() if name != "lr"} == {name: value for name, value in metrics.items() if name != "lr"}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"steps_per_jit": 4}, {"optimizer": "muon", "muon_split_jit": True}])
def test_skip_leaves_out_the_update_the_counts_and_the_statistics(three, options):
    config, rows = three
    config = config.replace(on_nonfinite="skip", **options)
    take = make_train_step(config)
    state, metrics = init_state(config), []
    size = config.steps_per_jit
    for start in range(0, 4, size):
        state, found = take(state, rows[start : start + size])
        metrics.append(found)
    # As if the batch had never been there.
    expected, plain = init_state(config), make_train_step(config.replace(on_nonfinite="stop", steps_per_jit=1))
    losses = 0.0
    for batch in (rows[0], rows[1], rows[3]):
        expected, found = plain(expected, [batch])
        losses += found["loss"]
    assert_same_bits(to_host(state), to_host(expected))
    assert state.step == 3 and sum(found["skipped"] for found in metrics) == 1
    assert np.isclose(sum(found["loss"] for found in metrics), losses, rtol=1e-6)


@pytest.mark.long
def test_ignore_trains_on_as_the_original_does(three):
    config, rows = three
    state, metrics = make_train_step(config.replace(on_nonfinite="ignore"))(init_state(config), [rows[2]])
    assert state.step == 1 and not np.isfinite(metrics["loss"])
    assert any(np.isnan(np.asarray(leaf)).any() for name, leaf in to_host(state).items() if name.startswith("params/"))


@pytest.mark.long
def test_a_gradient_alone_is_enough(three, monkeypatch):
    """The loss may be finite where its gradient is not, and the norm may not be computed at all."""
    config, rows = three
    plain = step.local_gradient

    def local_gradient(net, *arguments):
        gradients, terms = plain(net, *arguments)
        return step.jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(np.inf), gradients), terms

    monkeypatch.setattr(step, "local_gradient", local_gradient)
    with pytest.raises(NonfiniteError):
        make_train_step(config)(init_state(config), [rows[0]])


def test_a_run_that_skips_says_so_counts_on_and_goes_on_exactly(spoiled, tmp_path, capsys):
    words = dict(SMALL, on_nonfinite="skip", max_training_samples=11 * 16, save_every_samples=0)
    assert main(words_of(**words, traindir=tmp_path / "whole", datadir=spoiled)) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "dropped updates that were not finite: 1, so far 1" in err and "spoiled.npz from row 32" in err
    figures = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    train = [entry for entry in figures if entry["kind"] == "train"]
    assert [entry["step"] for entry in train] == list(range(1, 12)) and sum(entry["skipped"] for entry in train) == 1
    run = json.loads((store.complete(tmp_path / "whole" / store.FOLDER)[0] / store.RUN).read_text())
    assert run["skipped"] == 1 and run["step"] == 11


def test_a_run_that_only_skips_ends(spoiled, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_module, "MAX_SKIPPED_CALLS", 3)
    words = dict(SMALL, on_nonfinite="skip", lr=1e30, warmup_samples=0, lr_schedule="constant")
    assert main(words_of(**words, traindir=tmp_path, datadir=spoiled)) == 1
    assert "3 calls in a row had no finite step, the last from row " in capsys.readouterr().err
    assert os.path.exists(tmp_path / "metrics.jsonl")
