"""The benchmarks time equal work only; their committed results keep to what is claimed."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import diff_cost
from kgo_shard.diff.faults import FAULTS

RESULTS = Path(diff_cost.__file__).parent / "results"


@pytest.mark.long
def test_the_cost_of_a_diff_is_measured_on_equal_work_only(tape):
    shown = []
    samples = diff_cost.measure(tape, 2, shown.append)
    assert {name: len(times) for name, times in samples.items()} == {"plain": 2, "diff": 2} and len(shown) == 4
    assert all(time > 0 for times in samples.values() for time in times)
    with FAULTS["decay_on_norms"].plant(), pytest.raises(RuntimeError, match="unequal work.*norm1/weight"):
        diff_cost.measure(tape, 1, shown.append)


def test_a_full_state_diff_cost_at_most_half_as_much_again():
    results = json.loads((RESULTS / "diff_cost.json").read_text())
    medians = {name: statistics.median(times) for name, times in results["samples"].items()}
    assert results["ratio"] == medians["diff"] / medians["plain"] <= 1.5
    assert {"pos_len=19", "model_kind=b12c192"} <= set(results["environment"]["options"].split(", "))


def test_the_loop_stood_still_for_a_fifth_of_a_blocking_save_at_most():
    results = json.loads((RESULTS / "save_stall.json").read_text())
    medians = {name: statistics.median(times) for name, times in results["samples"].items()}
    assert results["stall ratio"] == medians["ours"] / medians["blocking"] <= 0.2
    assert results["start ratio"] == results["starts"][1] / results["starts"][0] < 1
    assert results["environment"]["model"] == "b12c192, pos_len 19"
