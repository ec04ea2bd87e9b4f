"""Own checkpoints: bits in and out, whole or not there, damage known by its checksum, a changed run or changed data refused."""

import contextlib
import errno
import importlib
import json
import os
import pickle
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from kgo_shard import checkpoint, resume, store
from kgo_shard.__main__ import main as kgo_shard_main
from kgo_shard.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, to_trees
from kgo_shard.config import Config, ConfigError
from kgo_shard.npz import DataError
from kgo_shard.state import init_state, to_host
from kgo_shard.store import Store
from kgo_shard.journal import SHOWN_TERMS
from kgo_shard.train import main, train

from .test_continuation import assert_same_bits
from .test_train import words_of

train_module = importlib.import_module("kgo_shard.train")
SMALL = {
    "pos_len": 9, "batch_size": 16, "model_kind": "b2c32", "max_training_samples": 64, "save_every_samples": 16, "ema_decay": 0.9,
    "compute_dtype": "float32", "max_val_batches": 1,
}  # fmt: skip


def config_of(**options) -> Config:
    return Config(**SMALL | options)


@pytest.fixture
def free(monkeypatch):
    """A step that only counts, so that the loop around it is quick."""
    terms = dict.fromkeys((*SHOWN_TERMS, "loss", "wsum", "grad_norm"), 1.0)

    def make_train_step(config):
        def step(state, batches):
            return type(state)(state.learned, state.step + len(batches), state.samples + len(batches) * config.batch_size), terms | {"lr": 0.1}

        return step

    monkeypatch.setattr(train_module, "make_train_step", make_train_step)
    monkeypatch.setattr(train_module, "make_eval_step", lambda config: lambda state, batch: terms)


def run(traindir, data, **options) -> tuple[list[str], int]:
    lines = []
    state = train(config_of(**options, traindir=traindir, datadir=data), log=lines.append)
    return lines, state.step


# Bits


@pytest.mark.parametrize("options", [{}, {"param_dtype": "bf16", "opt_state_dtype": "bf16"}, {"optimizer": "muon", "scan_blocks": True}, {"ema_decay": 0.0}])
def test_what_is_loaded_is_what_was_saved(tmp_path, options):
    config = config_of(**options)
    state = init_state(config)
    kept = Store(tmp_path, keep=2)
    kept.save(3, to_trees(state.learned), {"step": 3, "samples": 48})
    kept.close()
    for path in (tmp_path, tmp_path / store.FOLDER / "00000003"):  # the run folder, and the checkpoint itself
        loaded = load_checkpoint(path, config)
        assert_same_bits(to_host(state) | {"step": np.int64(3), "samples": np.int64(48)}, to_host(loaded))
    if "param_dtype" in options:
        assert to_host(loaded)["params/conv_spatial/w"].dtype == ml_dtypes.bfloat16


def test_leaves_lie_under_their_paths(tmp_path):
    state = init_state(config_of())
    store.write(tmp_path / "1", to_trees(state.learned), {"step": 1})
    names = {path.name for path in (tmp_path / "1" / store.STATE).iterdir() if path.is_dir()}
    assert {"params.blocks.0.q_proj.w", "opt_state.m.conv_spatial.w", "ema_params.norm_final.weight", "statistics.moving_sum"} <= names


def test_a_state_on_eight_devices_is_written_once(tmp_path):
    config = config_of(data_parallel=True, data_parallel_devices=8)
    store.write(tmp_path / "1", to_trees(init_state(config).learned), {"step": 1})
    parts = [path.name for path in (tmp_path / "1" / store.STATE / "params.conv_spatial.w").iterdir() if path.name != ".zarray"]
    assert len(parts) == 1


# Whole or not there


def test_so_many_are_kept_and_the_newest_is_used(tmp_path, rows9, free):
    run(tmp_path, rows9, keep=2)
    assert [path.name for path in store.complete(tmp_path / store.FOLDER)] == ["00000004", "00000003"]
    lines, step = run(tmp_path, rows9)
    assert step == 4 and "checkpoints/00000004: step 4, 64 samples" in lines[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add", "sums"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, rows9, free, capsys, damage):
    run(tmp_path, rows9)
    newest = tmp_path / store.FOLDER / "00000004"
    leaf = newest / store.STATE / "params.blocks.1.ffn_w1.w"
    part = next(path for path in leaf.iterdir() if path.name != ".zarray")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    {
        "flip": lambda: part.write_bytes(content),
        "cut": lambda: part.write_bytes(content[:10]),
        "remove": part.unlink,
        "add": lambda: (leaf / "extra").write_text("x"),
        "sums": lambda: (newest / store.CHECKSUMS).write_text("{"),
    }[damage]()
    lines, step = run(tmp_path, rows9)
    named = "checksums.json" if damage == "sums" else "params.blocks.1.ffn_w1.w"
    assert f"warning: {newest}: {named}" in capsys.readouterr().err
    assert "00000003: step 3" in lines[0] and step == 4
    assert_same_bits(*(to_host(load_checkpoint(tmp_path, config_of())) for _ in range(2)))  # step 4 was written anew


def test_a_folder_of_damaged_checkpoints_is_not_taken_for_an_empty_one(tmp_path, rows9, free, capsys):
    run(tmp_path, rows9, keep=1)
    (tmp_path / store.FOLDER / "00000004" / store.RUN).write_text("{}")
    assert main(words_of(**SMALL, traindir=tmp_path, datadir=rows9)) == 2
    assert "every checkpoint is damaged" in capsys.readouterr().err


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleared(tmp_path, rows9, free):
    run(tmp_path, rows9)
    half = store.unfinished(tmp_path / store.FOLDER / "00000009")
    half.mkdir()
    lines, _ = run(tmp_path, rows9)
    assert "00000004" in lines[0] and not half.exists()


def test_a_kill_while_a_step_is_saved_again_costs_nothing(tmp_path, rows9, free, monkeypatch):
    """At every rename and removal of the second save of one step."""
    for fatal in range(4):
        folder, count = tmp_path / str(fatal), 0
        run(folder, rows9, max_training_samples=32)
        newest = store.complete(folder / store.FOLDER)[0]
        state, saved = store.read(newest)

        def dying(original, number=fatal):
            def call(*arguments, **keywords):
                nonlocal count
                count += 1
                if count > number:
                    raise KeyboardInterrupt  # as far as the files go, a kill
                return original(*arguments, **keywords)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(type(newest), "rename", dying(type(newest).rename))
            patch.setattr(store.shutil, "rmtree", dying(store.shutil.rmtree))
            with contextlib.suppress(KeyboardInterrupt):
                store.write(newest, state, saved)
        lines, step = run(folder, rows9, max_training_samples=48, allow_changes="max_training_samples")
        assert "00000002: step 2" in lines[0] and step == 3, fatal
        assert [path.name for path in (folder / store.FOLDER).iterdir() if not path.name.isdecimal()] == []


def test_no_resume_in_the_originals_format_sets_own_checkpoints_aside(tmp_path, rows9, free):
    run(tmp_path, rows9)
    lines, _ = run(tmp_path, rows9, no_resume=True, checkpoint_format="legacy", max_training_samples=32)
    assert f"{tmp_path / store.FOLDER} is kept as" in lines[0]
    lines, step = run(tmp_path, rows9, checkpoint_format="legacy", max_training_samples=48)
    assert "checkpoint_jax.pkl: step 2" in lines[0] and step == 3


def test_a_run_folder_whose_name_orbax_cannot_write_is_refused_at_once(tmp_path, rows9, free):
    with pytest.raises(ConfigError, match="its name is not UTF-8"):
        run(tmp_path / os.fsdecode(b"t\xff"), rows9)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, rows9, free, monkeypatch, capsys):
    run(tmp_path, rows9, max_training_samples=32)
    before = {path: path.read_bytes() for path in (tmp_path / store.FOLDER).rglob("*") if path.is_file()}

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "sync", full)
    assert main(words_of(**SMALL | {"allow_changes": "max_training_samples"}, traindir=tmp_path, datadir=rows9)) == 2
    error = capsys.readouterr().err
    assert "00000003: cannot be saved (No space left on device)" in error and "00000002 is whole" in error and error.count("\n") == 1
    assert before == {path: path.read_bytes() for path in (tmp_path / store.FOLDER).rglob("*") if path.is_file()}


def test_a_second_trainer_is_refused(tmp_path, rows9, free):
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", script, tmp_path / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another trainer is at work there"):
        run(tmp_path, rows9)
    other.communicate("")
    assert run(tmp_path, rows9)[1] == 4


def test_beginning_afresh_keeps_what_was_there(tmp_path, rows9, free):
    run(tmp_path, rows9)
    lines, step = run(tmp_path, rows9, no_resume=True, max_training_samples=32)
    kept = tmp_path / f"{store.FOLDER}.before1"
    assert step == 2 and str(kept) in lines[0] and [path.name for path in store.complete(kept)][0] == "00000004"
    assert [path.name for path in store.complete(tmp_path / store.FOLDER)] == ["00000002", "00000001"]


@pytest.mark.long
def test_donated_buffers_are_copied_before_they_are_given_away(tmp_path, rows9, monkeypatch):
    """A step that really donates runs on while the save is written."""
    begun = []
    plain = store.write
    monkeypatch.setattr(store, "write", lambda path, state, run: (begun.append(jax.tree.map(np.asarray, state)), plain(path, state, run)))
    run(tmp_path, rows9, donate_train_buffers=True)
    assert len(begun) == 4
    assert [path.name for path in store.complete(tmp_path / store.FOLDER)] == ["00000004", "00000003", "00000002"]
    state, _ = store.read(tmp_path / store.FOLDER / "00000003")
    assert jax.tree.all(jax.tree.map(np.array_equal, state, begun[2]))


# The original's file


def test_a_run_of_the_originals_goes_on_in_the_own_format(tmp_path, rows9, free):
    config = config_of()
    state = init_state(config)
    save_checkpoint(tmp_path / checkpoint.FILE_NAME, type(state)(state.learned, 2, 32), config)
    lines, step = run(tmp_path, rows9)
    assert "checkpoint_jax.pkl: step 2, 32 samples" in lines[0] and step == 4
    assert "checkpoints/00000004" in run(tmp_path, rows9)[0][0]
    # Trained on by the original meanwhile: whichever is further.
    save_checkpoint(tmp_path / checkpoint.FILE_NAME, type(state)(state.learned, 9, 144), config)
    assert "checkpoint_jax.pkl: step 9" in run(tmp_path, rows9)[0][0]
    assert load_checkpoint(tmp_path, config).step == 9


# Another run, other data


def test_changed_options_are_refused_one_by_one_with_both_values(tmp_path, rows9, free, capsys):
    run(tmp_path, rows9)
    before = {path: path.read_bytes() for path in (tmp_path / store.FOLDER).rglob("*") if path.is_file()}
    changed = SMALL | {"lr": 0.5, "batch_size": 8, "print_every": 3, "keep": 7, "save_every_samples": 32}
    assert main(words_of(**changed, traindir=tmp_path, datadir=rows9)) == 2
    error = capsys.readouterr().err
    assert "batch_size was 16 and is 8" in error and "lr was 0.0002 and is 0.5" in error and "--allow-changes batch_size,lr" in error
    assert "print_every" not in error and "keep" not in error
    assert before == {path: path.read_bytes() for path in (tmp_path / store.FOLDER).rglob("*") if path.is_file()}
    assert main(words_of(**changed, allow_changes="batch_size, lr", resume_order="legacy", traindir=tmp_path, datadir=rows9)) == 0


def test_a_longer_run_is_another_schedule_unless_it_is_constant(tmp_path, rows9, free):
    run(tmp_path / "a", rows9)
    with pytest.raises(CheckpointError, match="max_training_samples was 64 and is 96"):
        run(tmp_path / "a", rows9, max_training_samples=96)
    run(tmp_path / "b", rows9, lr_schedule="constant")
    assert run(tmp_path / "b", rows9, lr_schedule="constant", max_training_samples=96)[1] == 6


def test_an_option_that_does_not_exist_cannot_be_allowed():
    with pytest.raises(ConfigError, match="allow_changes names leraning_rate"):
        config_of(allow_changes="lr,leraning_rate")


@pytest.fixture
def own_rows(tmp_path, rows9):
    """Two training files and one of validation, which may be changed."""
    for name, rows in (("train/a", 40), ("train/b", 40), ("val/a", 20)):
        path = tmp_path / "data" / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with np.load(rows9 / "train" / "data0.npz") as file:
            np.savez_compressed(path, **{key: file[key][:rows] for key in file})
    return tmp_path / "data"


def rewrite(path, row=7):
    with np.load(path) as file:
        rows = {key: file[key] for key in file}
    rows["globalTargetsNC"][row, 0] += 0.25
    np.savez_compressed(path, **rows)


def test_changed_data_under_the_same_names_are_noticed(tmp_path, own_rows, free, capsys):
    run(tmp_path / "run", own_rows, max_training_samples=32)
    longer = {"max_training_samples": 64, "allow_changes": "max_training_samples"}
    rewrite(own_rows / "train" / "b.npz")
    with pytest.raises(CheckpointError, match=r"b.npz has other content.*--resume-order legacy"):
        run(tmp_path / "run", own_rows, **longer)
    os.rename(own_rows / "train" / "b.npz", own_rows / "b.npz")
    with pytest.raises(CheckpointError, match=r"b.npz is gone in the middle of its epoch"):
        run(tmp_path / "run", own_rows, **longer)
    assert run(tmp_path / "run", own_rows, **longer, resume_order="legacy")[1] == 4


def test_new_files_wait_for_the_next_epoch_and_a_moved_folder_is_no_change(tmp_path, own_rows, free):
    run(tmp_path / "run", own_rows, max_training_samples=32)
    os.rename(own_rows, tmp_path / "moved")
    data = tmp_path / "moved"
    (data / "train" / "c.npz").write_bytes((data / "train" / "a.npz").read_bytes())
    longer = {"max_training_samples": 112, "allow_changes": "max_training_samples"}
    assert run(tmp_path / "run", data, **longer)[1] == 7
    saved = json.loads((tmp_path / "run" / store.FOLDER / "00000007" / store.RUN).read_text())
    # Four steps an epoch of two files; the next one has three.
    assert sorted(saved["place"]["order"]) == ["a.npz", "b.npz", "c.npz"] and saved["place"]["seed"] == 1234 + 4


def test_the_content_of_a_file_is_that_of_its_arrays(own_rows):
    path = own_rows / "train" / "a.npz"
    before = resume.content_of(path)
    os.utime(path, (1, 1))
    assert resume.content_of(path) == before
    rewrite(path)
    assert resume.content_of(path) != before


# What a reviewer found


def spoil(path):
    part = next(file for file in (path / store.STATE / "params.conv_spatial.w").iterdir() if file.name != ".zarray")
    part.write_bytes(part.read_bytes()[:-1])


def test_options_that_cannot_matter_any_more_may_change(tmp_path, rows9, free):
    run(tmp_path, rows9, max_training_samples=48, lr_schedule="constant")
    changed = {"init_std": 0.5, "muon_momentum": 0.5, "muon_polar_steps": 3}  # the parameters are there; the optimizer is AdamW
    assert run(tmp_path, rows9, lr_schedule="constant", **changed)[1] == 4
    with pytest.raises(CheckpointError, match="muon_target was 'all' and is 'attn'"):
        run(tmp_path, rows9, lr_schedule="constant", muon_target="attn")


def test_damaged_checkpoints_that_are_further_do_not_push_out_the_new_ones(tmp_path, rows9, free):
    run(tmp_path, rows9)
    for step in ("00000003", "00000004"):
        spoil(tmp_path / store.FOLDER / step)
    lines, step = run(tmp_path, rows9, keep=1, max_training_samples=48, allow_changes="max_training_samples")
    assert "00000002: step 2" in lines[0] and step == 3 and sum("is kept as" in line for line in lines) == 2
    assert [path.name for path in store.complete(tmp_path / store.FOLDER)] == ["00000003"]
    assert load_checkpoint(tmp_path, config_of()).step == 3


def test_a_file_that_vanishes_from_the_data_does_not_cost_the_save(tmp_path, own_rows, free, monkeypatch):
    plain = train_module.make_train_step

    def make_train_step(config):
        step = plain(config)

        def vanishing(state, batches):
            for path in (own_rows / "train").glob("*.npz"):
                path.unlink()
            return step(state, batches)

        return vanishing

    monkeypatch.setattr(train_module, "make_train_step", make_train_step)
    with pytest.raises(DataError, match="no such file"):  # the second file of the epoch
        run(tmp_path / "run", own_rows)
    assert [path.name for path in store.complete(tmp_path / "run" / store.FOLDER)] == ["00000002", "00000001"]


def test_files_of_the_epoch_that_were_read_may_go(tmp_path, own_rows, free):
    run(tmp_path / "run", own_rows, max_training_samples=48)
    saved = json.loads((tmp_path / "run" / store.FOLDER / "00000003" / store.RUN).read_text())
    assert saved["place"]["file"] == 1
    (own_rows / "train" / saved["place"]["order"][0]).unlink()
    assert run(tmp_path / "run", own_rows, max_training_samples=64, allow_changes="max_training_samples")[1] == 4


def test_other_marks_than_before_count_from_here(tmp_path, rows9, free):
    run(tmp_path, rows9, save_every_samples=1024, max_training_samples=48)
    run(tmp_path, rows9, save_every_samples=32, max_training_samples=160, allow_changes="max_training_samples", keep=9)
    assert [int(path.name) for path in store.complete(tmp_path / store.FOLDER)] == [10, 9, 7, 5, 3]


def test_a_former_run_of_the_originals_does_not_come_back(tmp_path, rows9, free):
    config = config_of()
    state = init_state(config)
    save_checkpoint(tmp_path / checkpoint.FILE_NAME, type(state)(state.learned, 3, 48), config)
    run(tmp_path, rows9, no_resume=True, max_training_samples=32)
    assert "checkpoints/00000002" in run(tmp_path, rows9, max_training_samples=32)[0][0]
    assert (tmp_path / f"{checkpoint.FILE_NAME}.before1").is_file()


def test_a_damaged_file_of_the_originals_is_no_obstacle(tmp_path, rows9, free, capsys):
    run(tmp_path, rows9)
    (tmp_path / checkpoint.FILE_NAME).write_bytes(b"half")
    assert "checkpoints/00000004" in run(tmp_path, rows9)[0][0] and "checkpoint_jax.pkl: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["options", "place", "window", "marks", "devices", "warned", "data", "samples"])
def test_a_run_file_that_is_not_ours_is_refused_in_one_line(tmp_path, rows9, free, capsys, key):
    run(tmp_path, rows9, keep=1)
    path = tmp_path / store.FOLDER / "00000004"
    content = json.loads((path / store.RUN).read_text())
    del content[key]
    (path / store.RUN).write_text(json.dumps(content))
    sums = json.loads((path / store.CHECKSUMS).read_text())
    (path / store.CHECKSUMS).write_text(json.dumps(sums | {store.RUN: store.checksum(path / store.RUN)}))
    assert main(words_of(**SMALL, traindir=tmp_path, datadir=rows9)) == 2
    error = capsys.readouterr().err
    assert f"run.json has no {key}" in error and error.count("\n") == 1


def test_another_batch_in_the_middle_of_an_epoch_is_refused(tmp_path, rows9, free):
    run(tmp_path, rows9)
    with pytest.raises(CheckpointError, match="in batches of 16 rows, this run reads 8"):
        run(tmp_path, rows9, batch_size=8, allow_changes="batch_size")


def test_another_optimizer_is_refused_by_the_api_too(tmp_path, rows9, free):
    run(tmp_path, rows9)
    for options, message in (({"optimizer": "muon"}, "optimizer adamw, but the options say muon: give --optimizer"), ({"pos_len": 19}, "pos_len 9, but the options say 19")):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, config_of(**options))


def test_folders_that_cannot_be_a_run_are_refused_before_training(tmp_path, rows9, free):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / store.FOLDER).write_text("mine")
    with pytest.raises(ConfigError, match="checkpoints: nothing can be written there"):
        run(tmp_path / "a", rows9)
    run(tmp_path / "b", rows9)
    with pytest.raises(ConfigError, match="is a checkpoint, not a run folder"):
        run(tmp_path / "b" / store.FOLDER / "00000004", rows9)
    assert store.read(tmp_path / "b" / store.FOLDER / "00000004")[1]["step"] == 4


# From one format into the other


def test_own_to_original_and_back_is_the_same(tmp_path, rows9, free, capsys):
    run(tmp_path / "run", rows9)
    assert command("convert", tmp_path / "run", tmp_path / "c.pkl") == 0
    assert_same_bits(to_host(load_checkpoint(tmp_path / "run", config_of())), to_host(load_checkpoint(tmp_path / "c.pkl", config_of())))
    assert command("convert", tmp_path / "c.pkl", tmp_path / "again", *words_of(**SMALL)) == 0
    assert_same_bits(to_host(load_checkpoint(tmp_path / "c.pkl", config_of())), to_host(load_checkpoint(tmp_path / "again", config_of())))
    assert "step 4, 64 samples" in capsys.readouterr().out
    lines, step = run(tmp_path / "again", rows9, max_training_samples=96, allow_changes="max_training_samples")
    assert "checkpoints/00000004" in lines[0] and step == 6


@pytest.mark.long
def test_the_moving_average_becomes_the_parameters(tmp_path, rows9):
    train(config_of(traindir=tmp_path / "run", datadir=rows9, param_dtype="bf16"), log=lambda line: None)
    assert command("convert", tmp_path / "run", tmp_path / "ema.pkl", "--use", "ema") == 0
    config = config_of(param_dtype="bf16")
    before, after = (to_host(load_checkpoint(tmp_path / name, config)) for name in ("run", "ema.pkl"))
    name = "conv_spatial/w"
    assert after[f"params/{name}"].dtype == ml_dtypes.bfloat16 and (before[f"params/{name}"] != after[f"params/{name}"]).any()
    assert after[f"params/{name}"].tobytes() == before[f"ema_params/{name}"].astype(ml_dtypes.bfloat16).tobytes()


def test_a_conversion_that_fails_leaves_nothing(tmp_path, rows9, free, monkeypatch, capsys):
    run(tmp_path / "run", rows9)

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "sync", full)
    assert command("convert", tmp_path / "run", tmp_path / "new") == 2
    assert "No space left" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_what_cannot_be_converted_is_said(tmp_path, rows9, free, capsys):
    run(tmp_path / "run", rows9, ema_decay=0.0)
    (tmp_path / "there").mkdir()
    (tmp_path / "some.pkl").write_bytes(b"")
    (tmp_path / "empty.pkl").write_bytes(pickle.dumps({"params": {}, "opt_state": {}, "meta": {}}))
    for words, message in (
        ((tmp_path / "run", tmp_path / "there"), "is there already"),
        ((tmp_path / "run", tmp_path / "new.pkl", "--use", "ema"), "has no moving average"),
        ((tmp_path / "run", tmp_path / "new.pkl", "--pos-len", "9"), "it holds its own options"),
        ((tmp_path / "some.pkl", tmp_path / "new.pkl"), "some.pkl: cannot be read"),
        ((tmp_path / "empty.pkl", tmp_path / "new.pkl"), "does not hold the options"),
        ((tmp_path / "there", tmp_path / "new.pkl"), "holds no checkpoint"),
        ((tmp_path / "nothing.pkl", tmp_path / "new.pkl"), "no such file"),
        ((tmp_path / "nothing.pkl", tmp_path / "new.pkl", "--pos-len", "9"), "no such file"),
    ):
        assert command("convert", *words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "new.pkl").exists()


def command(*words) -> int:
    return kgo_shard_main([str(word) for word in words])
