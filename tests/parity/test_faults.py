"""The harness can fail: every planted fault is found, at the step and stage where it was planted."""

import json
from pathlib import Path

import pytest

from kgo_shard.__main__ import fault_input
from kgo_shard.config import ConfigError
from kgo_shard.diff import fault_matrix
from kgo_shard.diff.faults import FAULTS, choose

RESULTS = Path(__file__).parent / "results"
# One of each stage, and those that the project is about; `kgo-shard faults` runs them all. The first ones compile least.
SHORT = (
    "leaves_swapped",
    "moments_not_restored",
    "ema_not_restored",
    "statistics_not_restored",
    "counts_not_restored",
    "naive_port",
    "decay_on_norms",
)
LONG = (
    "epoch_seed_without_step",
    "rows_dealt_round_robin",
    "statistics_reduced_before_use",
    "leaf_not_reduced",
    "schedule_off_by_one",
    "metrics_averaged",
    "evaluation_with_training_weight",
)


@pytest.fixture(scope="module")
def findings():
    """Old and new are equal without a fault, or `run_faults` raises."""
    return {found.name: found for found in fault_matrix.run_faults(SHORT, *fault_input())}


@pytest.fixture(scope="module")
def more_findings():
    return {found.name: found for found in fault_matrix.run_faults(LONG, *fault_input())}


@pytest.mark.parametrize("name", SHORT)
def test_fault_is_named_where_it_was_planted(findings, name):
    check_named(findings[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_another_fault_is_named_where_it_was_planted(more_findings, name):
    check_named(more_findings[name])
    assert more_findings["statistics_reduced_before_use"].printed_alike is False


SPLIT = ("half_the_mesh", "gradients_summed", "leaf_not_reduced", "moments_not_restored")


@pytest.mark.long
def test_faults_are_named_where_the_state_is_split_too():
    found = list(fault_matrix.run_faults(SPLIT, *fault_input("data")))
    assert [one.name for one in found] == list(SPLIT)
    for one in found:
        check_named(one)


def check_named(found):
    fault = FAULTS[found.name]
    bad = found.comparison.first_bad
    assert bad is not None, "not detected"
    assert (bad.step, bad.stage) == (fault.step, fault.stage), found.comparison.verdict()
    assert found.named


def test_the_loss_alone_would_not_have_shown_them(findings):
    """A fault may leave every printed digit of the loss as it is: that is why every leaf is compared."""
    assert {name for name, found in findings.items() if found.printed_alike} >= {"naive_port", "decay_on_norms", "ema_not_restored"}


def test_a_difference_elsewhere_is_not_taken_for_the_fault(findings):
    found = findings["naive_port"]
    other = found._replace(fault=found.fault._replace(stage="parameters"))
    assert not other.named and "DIFFERENT" in other.row()[-1]
    assert "FAILED" in fault_matrix.faults_section([found, other])["verdict"]


def test_the_subset_has_a_fault_of_every_stage_but_the_clip():
    """The clip's fault, like Muon's, needs programs of its own: the whole matrix has them."""
    assert {FAULTS[name].stage for name in SHORT + LONG} == {fault.stage for fault in FAULTS.values()} - {"clip"}


def test_faults_leave_nothing_behind():
    """What a fault replaces is itself again afterwards."""
    from kgo_shard import augment, batches, checkpoint, convert, loss, mesh, muon, optim, reduce, state, step
    from kgo_shard.diff import shard_side

    modules = (augment, batches, checkpoint, convert, loss, mesh, muon, optim, reduce, state, step, shard_side)

    def contents():
        return [dict(vars(module)) for module in modules]

    before = contents()
    for name, fault in FAULTS.items():
        with fault.plant():
            changed = contents() != before
        assert contents() == before, name
        assert changed or name == "target_column_off_by_one", name  # that one changes a class


def test_two_faults_cannot_be_made_where_the_state_is_split():
    assert set(FAULTS) - set(choose(None, "--only", "data")) == {"naive_port", "automatic_sum_in_bfloat16"}
    assert choose(None, "--only") == list(FAULTS) and choose(["ema_in_bfloat16"], "--only", "data") == ["ema_in_bfloat16"]
    with pytest.raises(ConfigError, match="--only naive_port: not with --shard-state data"):
        choose(["naive_port"], "--only", "data")


@pytest.mark.parametrize(("file", "shard_state"), [("faults_jax_0.10.2.json", "none"), ("faults_split_jax_0.10.2.json", "data")])
def test_the_committed_matrix_named_every_fault(file, shard_state):
    results = json.loads((RESULTS / file).read_text())
    assert results["environment"]["JAX"] == "0.10.2" and results["environment"].get("shard_state", "none") == shard_state
    assert set(results["faults"]) == set(choose(None, "--only", shard_state)) and len(FAULTS) >= 36
    for name, entry in results["faults"].items():
        assert entry["named"], (name, entry)
        assert (entry["planted"]["step"], entry["planted"]["stage"]) == (FAULTS[name].step, FAULTS[name].stage), name
