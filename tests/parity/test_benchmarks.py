"""The benchmarks' formulas, by numbers worked out by hand; their committed results keep to what is claimed."""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from unittest import mock

import jax
import pytest

from benchmarks import components, diff_cost, draw, measure, quality, scaling, sweep
from benchmarks.measure import RESULTS
from kgo_shard.config import Config
from kgo_shard.diff.collectives import Collective
from kgo_shard.diff.faults import FAULTS
from kgo_shard.flops import muon_flops, training_flops


@pytest.mark.long
def test_the_cost_of_a_diff_is_measured_on_equal_work_only(tape):
    shown = []
    samples = diff_cost.time_diff(tape, 2, shown.append)
    assert {name: len(times) for name, times in samples.items()} == {"plain": 2, "diff": 2} and len(shown) == 4
    assert all(time > 0 for times in samples.values() for time in times)
    with FAULTS["decay_on_norms"].plant(), pytest.raises(RuntimeError, match="unequal work.*norm1/weight"):
        diff_cost.time_diff(tape, 1, shown.append)


def test_a_full_state_diff_cost_at_most_half_as_much_again():
    results = json.loads((RESULTS / "diff_cost.json").read_text())
    medians = {name: statistics.median(times) for name, times in results["samples"].items()}
    assert results["ratios"]["diff"] == medians["diff"] / medians["plain"] <= 1.5
    assert (results["settings"]["pos_len"], results["settings"]["model_kind"]) == (19, "b12c192")


def test_the_loop_stood_still_for_a_fifth_of_a_blocking_save_at_most():
    results = json.loads((RESULTS / "save_stall.json").read_text())
    medians = {name: statistics.median(times) for name, times in results["samples"].items()}
    assert results["ratios"]["stall"] == medians["ours"] / medians["blocking"] <= 0.2
    for devices, (first, second) in results["starts"].items():
        assert results["ratios"]["start"][devices] == second / first < 1
    assert (results["settings"]["pos_len"], results["settings"]["model_kind"]) == (19, "b12c192")


# Formulas, by numbers worked out by hand.


@pytest.mark.parametrize(
    ("mode", "alone", "together", "devices", "expected"),
    [(scaling.GLOBAL, 8, 5, 2, 0.8), (scaling.LOCAL, 2, 2.5, 16, 0.8), (scaling.GLOBAL, 3, 3, 1, 1)],
)
def test_efficiency(mode, alone, together, devices, expected):
    assert scaling.efficiency(mode, alone, together, devices) == pytest.approx(expected)


@pytest.mark.parametrize(("size", "devices", "link", "expected"), [(10**9, 8, 100, 0.0175), (450 * 10**6, 2, 450, 1e-3), (10**9, 1, 450, 0)])
def test_predicted_time_of_a_ring(size, devices, link, expected):
    assert scaling.predicted_seconds(size, devices, link) == pytest.approx(expected)


def test_ratios_of_scaling_rows_are_of_one_mode():
    rows = [{"mode": mode, "devices": count, "samples": {"pmap": [t], "shard_map": [2 * t]}} for mode, count, t in
            ((scaling.GLOBAL, 1, 4.0), (scaling.GLOBAL, 4, 2.0), (scaling.LOCAL, 1, 1.0), (scaling.LOCAL, 4, 2.0))]  # fmt: skip
    rows.append({"mode": scaling.LOCAL, "devices": 8, "not run": "too few"})
    scaling.add_ratios(rows)
    assert [row["efficiency"]["pmap"] for row in rows[:-1]] == [1, 0.5, 1, 0.5] and {row["ratio"] for row in rows[:-1]} == {2}
    assert [row["cost on shared cores"]["shard_map"] for row in rows[:-1]] == [1, 0.5, 1, 0.5] and "ratio" not in rows[-1]


def test_scaling_says_what_each_row_holds_fixed():
    assert scaling.settings_of([1, 4], 16, 2) == [(scaling.GLOBAL, 1, 16), (scaling.GLOBAL, 4, 16), (scaling.LOCAL, 1, 2), (scaling.LOCAL, 4, 8)]


def test_a_program_of_only_gathers_is_refused():
    with pytest.raises(NotImplementedError, match="all_gather"):
        scaling.make_collectives(None, Counter({Collective("all_gather", "f32", 3, 2): 1}))


def test_the_t_interval_of_a_mean():
    assert quality.interval([0.01, 0.02, 0.03]) == pytest.approx((-0.0048414, 0.0448414), abs=1e-6)  # 0.02 -+ 4.30265 x 0.01 / sqrt(3)


def test_where_a_curve_crosses_the_target():
    curve = [(0, 0.0, 60.0), (100, 1.0, 50.0), (200, 3.0, 40.0)]
    assert quality.crossing(curve, 45.0) == {"reached": True, "samples": 150, "seconds": 2}
    assert quality.crossing(curve, 30.0) == {"reached": False, "samples": 200, "seconds": 3}
    assert quality.crossing(curve[:1], 70.0) == {"reached": True, "samples": 0, "seconds": 0}


@pytest.mark.parametrize(
    ("ratios", "lost", "verdict", "reason"),
    [
        ((1.0, 1.01, 0.99), None, "not inferior", "below"),
        ((1.3, 1.31, 1.29), None, "inferior", "above"),
        ((0.9, 1.3, 1.0), None, "not shown", "holds"),
        ((1.0,), None, "not shown", "two seeds"),
        ((1.0, 1.01, 0.99), "new", "not shown", "the new side did not"),
        ((1.3, 1.31, 1.29), "new", "inferior", "above"),
        ((1.0, 1.01, 0.99), "old", "not shown", "the original did not"),
    ],
)
def test_the_verdict_on_paired_seeds(ratios, lost, verdict, reason):
    old = [{"samples": 1000, "reached": lost != "old"} for _ in ratios]
    new = [{"samples": 1000 * ratio, "reached": lost != "new"} for ratio in ratios]
    found = quality.judge(old, new, "samples", 0.05)
    assert found["verdict"] == verdict and reason in found["reason"]


def test_utilisation_and_sums_of_parts():
    assert components.utilisation(1e9, 0.5, 4e9) == 0.5
    assert components.sum_of_parts({"stem": 1, "block": "layers", "norm": 2}, {"stem": 1.0, "block": 10.0, "norm": 0.25}, 12) == 121.5


def test_muons_work_counts_on_every_device():
    config = Config(model_kind="b2c32", pos_len=9, batch_size=16, optimizer="muon", **measure.parallel(4))
    flops = components.part_flops(config)
    assert flops["optimizer"] == 4 * muon_flops(config) and flops["step"] == 16 * training_flops(config.model)
    assert components.part_flops(config.replace(optimizer="adamw"))["optimizer"] == 0


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H200", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H100 80GB HBM3", 989.4), ("TPU v5 lite", 197), ("TPU v5p", 459), ("cpu", None)],
)
def test_known_peaks(kind, peak):
    assert measure.known_peak(kind) == peak


def test_median_tenth_and_spread():
    assert measure.summary([5.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 3, "90 %": 4.6, "spread": 2}


def test_what_compiles_while_it_is_timed_is_refused():
    calls = {"new every time": lambda: jax.jit(lambda x: x + 1)(1.0), "kept": lambda: 0}
    with pytest.raises(AssertionError, match="compiled while the clock ran"):
        measure.time_calls(calls, 2)
    kept = jax.jit(lambda x: x + 2)
    assert {name: len(times) for name, times in measure.time_calls({"a": lambda: kept(1.0), "b": lambda: 0}, 3).items()} == {"a": 3, "b": 3}


def test_settings_of_a_sweep():
    found = sweep.settings_of({"pos_len": 9}, ["b2c32", "b3c96"], [4, 16], ["", "muon_target=attn,muon_momentum=0.9"], "b2c32")
    assert [(options["optimizer"], options["model_kind"], options["batch_size"]) for options in found] == [
        ("adamw", "b2c32", 4), ("adamw", "b2c32", 16), ("adamw", "b3c96", 4), ("adamw", "b3c96", 16), ("muon", "b2c32", 16), ("muon", "b2c32", 16)]  # fmt: skip
    assert found[-1]["muon_target"] == "attn" and found[-1]["muon_momentum"] == 0.9 and "muon_target" not in found[-2]


@pytest.mark.parametrize(
    ("ending", "row"),
    [
        (subprocess.CompletedProcess([], -9, "", ""), {"does not fit": "ended by signal 9 (out of memory?)"}),
        (subprocess.CompletedProcess([], 1, "", "a\nValueError: b"), {"failed": "ValueError: b"}),
        (subprocess.CompletedProcess([], 0, 'noise\nROW {"does not fit": "c"}\n', ""), {"does not fit": "c"}),
        (subprocess.TimeoutExpired("", 5), {"does not fit": "took longer than 5 s"}),
    ],
)
def test_a_row_whose_process_ends_otherwise_says_so(ending, row):
    with mock.patch.object(subprocess, "run", side_effect=[ending]):
        assert sweep.run_apart({}, [], 5) == row


def test_rows_of_a_sweep_are_sorted_and_those_that_did_not_run_come_last():
    rows = [{"options": {"batch_size": 8}, "samples": {"pmap": [t], "shard_map": [t / 2]}} for t in (4.0, 1.0)]
    rows.insert(0, {"options": {"batch_size": 3}, "does not fit": "no"})
    assert [row.get("rows a second") for row in sweep.sort_rows(rows)] == [{"pmap": 8, "shard_map": 16}, {"pmap": 2, "shard_map": 4}, None]


def test_goals_are_named_reached_or_not():
    latency = {"pmap": [1.0, 1.02], "shard_map": [1.01, 1.01]}
    samples = {name: {"latency": [{"whole": one} for one in times], "rate": [2 * one for one in times]} for name, times in latency.items()}
    samples["shard_map"]["rate"] = [2.1, 2.2]
    found = {"step-adamw": {"ratios": {"latency": {"shard_map": 1.0}, "rate": {"shard_map": 1.06}}, "samples": samples},
             "input": {"ratios": {"with history and symmetry, host": 5.0, "with history and symmetry, finished": 3.9}, "bytes_a_row": {"ours": 5900.0}}}  # fmt: skip
    assert [line.rpartition(": ")[2].strip("*") for line in draw.goals(found)] == ["the goal lies within the interval", "not reached", "reached", "not reached", "reached"]


def test_the_interval_of_a_ratio_is_that_of_its_medians():
    same, twice = [1.0, 1.1, 0.9, 1.05, 0.95], [2.0, 2.2, 1.8, 2.1, 1.9]
    low, high = measure.ratio_interval(twice, same)
    assert 1.6 < low < 2 < high < 2.5 and measure.ratio_interval([3.0] * 4, [2.0] * 4) == (1.5, 1.5)
    assert measure.interval(lambda a, b, c: a + b - c, [1.0], [5.0, 5.0], [2.0]) == (4, 4)


def test_a_benchmark_refuses_before_the_work(tmp_path, capsys):
    for text in ("0", "-1", "1.5", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="whole number from 1 on"):
            measure.positive(text)
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
        measure.writable("/proc/nope/x.json")
    assert measure.positive("3") == 3 and measure.writable(str(tmp_path / "a" / "b.json")).parent.is_dir() and not (tmp_path / "a" / "b.json").exists()
    for count in (-1, 100000):
        with pytest.raises(SystemExit, match="1 to 512"):
            measure.start_devices(count)

    def refused():
        raise measure.UnequalWork("unlike\nlines")

    assert measure.ended(refused) == 2 and capsys.readouterr().err == "error: unlike lines\n"
    assert measure.ended(lambda: 0) == 0


def test_the_section_is_drawn_between_the_markers_only(tmp_path, monkeypatch, capsys):
    for name in ("diff_cost", "save_stall"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{draw.BEGIN}\nold\n{draw.END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["draw", "--results", str(tmp_path), "--readme", str(readme)])
    assert draw.main() == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{draw.BEGIN}\n- ") and text.endswith(f"{draw.END}\nafter\n") and "old" not in text.split()
    assert "**Saving** (b12c192" in text and "**Comparing** (b12c192" in text
    monkeypatch.setattr(sys, "argv", ["draw", "--results", str(tmp_path / "nothing"), "--readme", str(readme)])
    assert draw.main() == 2 and "no results" in capsys.readouterr().err and readme.read_text() == text
    monkeypatch.setattr(sys, "argv", ["draw", "--results", str(tmp_path), "--readme", str(readme)])
    readme.write_text("no markers")
    assert draw.main() == 2 and "has no" in capsys.readouterr().err
    assert draw.BEGIN in (RESULTS.parents[1] / "README.md").read_text()
