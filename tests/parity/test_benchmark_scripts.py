"""Every benchmark runs at the smallest size and keeps every sample; unequal work is refused before anything is timed."""

from collections import Counter

import jax
import numpy as np
import pytest

from benchmarks import components, contenders, draw, input, masters, measure, quality, save_stall, scaling, split_state, step, sweep
from kgo_shard.batches import find_files
from kgo_shard.config import Config
from kgo_shard.diff.faults import FAULTS
from kgo_shard.state import learned_shapes

pytestmark = pytest.mark.long
OPTIONS = dict(model_kind="b2c32", pos_len=9, batch_size=16, optimizer="adamw", compute_dtype="float32", enable_history_matrices=True)


@pytest.fixture
def compared(monkeypatch):
    """What was compared in exact mode: its own test does it, the scripts' tests only see that it is asked for first."""
    asked = []
    monkeypatch.setattr(measure, "refuse_unequal_work", lambda options, datadir, devices: asked.append((options["optimizer"], devices)))
    return asked


def silent(_):
    pass


def test_equal_work_passes_and_a_planted_fault_is_refused(rows9):
    measure.refuse_unequal_work(OPTIONS, rows9, 2)
    with pytest.raises(measure.UnequalWork, match="(?s)exit code 1.*DIFFERENT: first at step 1"):
        measure.refuse_unequal_work(OPTIONS | {"fault": "gradients_summed"}, rows9, 2)


def test_the_step(compared, rows9):
    found = step.run(OPTIONS, rows9, 2, 2, 1, silent)
    assert compared == [("adamw", 2)]
    assert set(found["samples"]) == {"pmap", "shard_map", "jit", "one device", "pmap, [0]"}
    for samples in found["samples"].values():
        assert len(samples["latency"]) == len(samples["rate"]) == 2
        assert all(one["whole"] == pytest.approx(sum(one[piece] for piece in ("place", "dispatch", "wait", "fetch"))) for one in samples["latency"])
    assert found["refused"] == {} and found["ratios"]["latency"]["pmap"] == 1 and {len(times) for times in found["reading"].values()} == {2}
    assert "| shard_map |" in draw.section({"step-adamw": found}) and "an AdamW step" in draw.section({"step-adamw": found})


def test_automatic_sharding_that_does_something_else_is_refused_and_not_timed(rows9):
    config, files = Config(**OPTIONS, **measure.parallel(2)), find_files(rows9 / "train")
    made = [contenders.make_shard_map(config, files, 1), contenders.make_automatic(config, files, 1)]
    with FAULTS["stop_gradient_dropped"].plant():
        refused = step.drop_unequal_automatic(made, config, files, silent)
    assert [one.name for one in made] == ["shard_map"] and "first at step 1, stage moments" in refused["jit"]


def test_scaling(compared, rows9):
    found = scaling.run(OPTIONS, rows9, [2, 32], 8, 2, 100.0, silent)
    assert compared == [("adamw", 2)]
    assert [(row["mode"], row["devices"], row["batch_size"]) for row in found["rows"]] == [
        (scaling.GLOBAL, 2, 16), (scaling.GLOBAL, 32, 16), (scaling.LOCAL, 2, 16), (scaling.LOCAL, 32, 256)]  # fmt: skip
    row, too_many, same, _ = found["rows"]
    assert {name: len(times) for name, times in row["samples"].items()} == {"pmap": 2, "shard_map": 2} and same["samples"] == row["samples"]
    # One for each of 29 leaves, two moving statistics and the vector of metrics; on one device there is none to time.
    assert {sent["arrays"] for sent in row["collectives"].values()} == {32} and len(row["collectives alone"]) == 2
    assert row["predicted"] == row["collectives"]["shard_map"]["bytes"] / 100e9 and scaling.time_collectives(None, Counter(), 2) == []
    assert "divide" in too_many["not run"] and "samples" not in too_many
    text = draw.section({"scaling": found})
    assert text.count("| fixed global batch |") == 2 and "share the cores" in text


def test_the_split_state(compared, rows9):
    found = split_state.run(OPTIONS, rows9, 2, 2, [1, 2])
    assert compared == [("adamw", 2), ("muon", 2)]
    assert {name: len(times) for name, times in found["samples"].items()} == dict.fromkeys(
        (f"{side}, {rule}" for rule in ("adamw", "muon") for side in ("pmap", "replicated", "split")), 2)  # fmt: skip
    assert {count: len(times) for count, times in found["growth"]["samples"].items()} == {1: 2, 2: 2}
    held = found["bytes_held"]
    assert 0.5 <= held["split, muon"] / held["replicated, muon"] < 0.51
    text = draw.section({"split_state": found})
    assert "| split, muon |" in text and "on paper, 8 chips, b24c1024" in text and text.count("the goal at most") == 5


def test_what_muon_adds_is_a_share_of_what_it_adds_to_pmap():
    seconds = {"pmap": (2, 3), "replicated": (2, 4), "split": (1, 1.25)}
    found = split_state.ratios_of({f"{side}, {rule}": [s] for side, two in seconds.items() for rule, s in zip(("adamw", "muon"), two, strict=True)})
    assert found["added by Muon, split"] == 0.25 and found["added by Muon, replicated"] == 2 and found["split, adamw"] == 0.5


def test_on_paper_a_chip_does_an_eighth_of_muon_and_sends_less():
    chips = split_state.on_paper(8)
    assert chips["split"]["muon"] * 8 == chips["replicated"]["muon"] and chips["split"]["state"] * 8 == chips["replicated"]["state"]
    # The figures for b24c1024 with 16 rows a chip: 6.3 on top of 12 TFLOP.
    assert round(chips["replicated"]["muon"] / 1e12, 1) == 6.3 and round(chips["replicated"]["model"] / 1e12) == 12
    params = sum(leaf.size for leaf in jax.tree.leaves(learned_shapes(Config(model_kind="b24c1024")).net))
    assert chips["split"]["sent"] < chips["replicated"]["sent"] == 2 * 7 / 8 * 4 * params


def test_masters(rows9):
    found = masters.run(OPTIONS | {"lr": 1e-5, "lr_schedule": "constant"}, rows9, 2, 1, 64, silent)
    assert {name: [len(one["unmoved"]) for one in seeds] for name, seeds in found["samples"].items()} == dict.fromkeys(masters.RUNS, [4])
    assert found["unmoved"]["float32"] < 0.05 and found["unmoved"]["bfloat16, masters"] < 0.05 and found["unmoved"]["bfloat16"] > 0.5
    assert "| bfloat16, masters |" in draw.section({"masters": found})


def test_components(compared, rows9, tmp_path):
    found = components.run(OPTIONS | {"optimizer": "muon"}, rows9, 2, 2, 1.5, silent, longest=1e-4)
    assert compared == [("muon", 2)]
    assert {len(times) for times in found["samples"].values()} == {2}
    assert {"stem", "norm", "attention", "ffn", "block", "trunk", "heads", "forward", "loss", "gradient", "mean", "optimizer", "step"} <= set(
        found["samples"]
    )
    assert set(found["sums"]) == set(components.SUMS) and set(found["peaks"]) == {"float32"}
    model, both = (found["utilisation"][work] for work in ("model", "with Muon"))
    assert set(model) == {"measured", "stated"} and 0 < model["stated"] < both["stated"]
    assert model["stated"] / model["measured"] == pytest.approx(found["peaks"]["float32"]["flops"] / 3e12)
    assert "| attention |" in draw.section({"components": found}) and "of the stated peak" in draw.section({"components": found})


def test_quality_is_not_inferior_and_with_half_the_rate_it_is(compared, rows9, tmp_path):
    options = OPTIONS | {"batch_size": 32, "lr": 2e-3, "warmup_samples": 64, "lr_schedule": "constant"}
    equal, worse = (quality.run(options, rows9, 2, 3, 52.0, 0.05, 128, 2048, silent, changes) for changes in ({}, {"lr": 1e-3}))
    assert compared == [("adamw", 2)] * 2
    assert {name: len(seeds) for name, seeds in equal["samples"].items()} == {"pmap": 3, "shard_map": 3}
    assert all(seed["reached"] and seed["curve"][-1][2] <= 52 for seeds in equal["samples"].values() for seed in seeds)
    assert equal["verdicts"]["samples"]["verdict"] == "not inferior" and worse["verdicts"]["samples"]["verdict"] == "inferior"
    assert "not inferior" in draw.section({"quality": equal})
    assert [path.name for path in draw.draw_pictures({"quality": equal}, tmp_path)] == ["quality.png"] and (
        tmp_path / "quality.png"
    ).stat().st_size > 1000


def test_a_sweep_has_a_row_for_what_does_not_fit(compared, rows9):
    kinds = [OPTIONS | {"batch_size": size} for size in (3, 4, 512)]
    found = sweep.run(kinds, rows9, 2, 2, None, 300, silent)
    assert compared == [("adamw", 2)]
    ran, odd, large = found["rows"]
    assert ran["options"]["batch_size"] == 4 and {name: len(times) for name, times in ran["samples"].items()} == {"pmap": 2, "shard_map": 2}
    assert "divide" in odd["does not fit"] and "none of 2 files holds the 512 rows" in large["does not fit"]
    assert "the limit is 0.001 GiB" in sweep.measure_one(kinds[1], rows9, 2, 1, 0.001)["does not fit"]
    assert draw.section({"sweep": found}).count("does not fit") == 2


def test_large_files_hold_the_real_rows_over_and_over(tmp_path, rows9):
    files = find_files(rows9 / "train")
    parts, large = [np.load(path) for path in files], [np.load(path) for path in input.write_large_files(files, tmp_path, 2, 500)]
    for key in parts[0].files:
        if parts[0][key].ndim:
            real = np.concatenate([part[key] for part in parts])
            np.testing.assert_array_equal(np.concatenate([file[key] for file in large]), np.take(real, range(1000), axis=0, mode="wrap"))


def test_input(compared, rows9):
    found = input.run(OPTIONS, rows9, 2, 1, silent)
    assert compared == [("adamw", 2)]
    assert {len(rates) for mode in found["rows_a_second"].values() for rates in mode.values()} == {1}
    assert {name: len(times) for name, times in found["checkpoints"].items()} == dict.fromkeys(
        ("save, original's", "load, original's", "save, ours", "load, ours"), 1
    )
    assert found["bytes_a_row"]["ours"] < found["bytes_a_row"]["original"] / 4
    assert "rows a second with history" in draw.section({"input": found})


def test_save_stall(rows9):
    options = {"pos_len": 9, "model_kind": "b2c32", "batch_size": 8, "ema_decay": 0.999, "compute_dtype": "float32"}
    found = save_stall.run(options, rows9, 2, 2, silent)
    assert {len(times) for times in found["samples"].values()} == {2} and {count: len(times) for count, times in found["starts"].items()} == {1: 2, 2: 2}
    assert "stands still" in draw.section({"save_stall": found})
