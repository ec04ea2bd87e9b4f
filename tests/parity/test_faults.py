"""The harness can fail: every planted fault is found, at the step and stage where it was planted."""

import pytest

from kgo_shard.diff import legacy_side, shard_side
from kgo_shard.diff.compare import compare
from kgo_shard.diff.faults import FAULTS
from kgo_shard.diff.trace import record

# One of each stage, and those that the project is about; `python -m tests.parity.fault_matrix` runs them all.
SUBSET = (
    "leaves_swapped",
    "rows_dealt_round_robin",
    "statistics_reduced_before_use",
    "naive_port",
    "leaf_not_reduced",
    "schedule_off_by_one",
    "beta_in_double",
    "decay_on_norms",
    "ema_before_update",
    "statistics_not_averaged",
    "metrics_averaged",
)


@pytest.fixture(scope="module")
def short(tape):
    return tape._replace(steps=1)


@pytest.fixture(scope="module")
def old(short):
    return record(legacy_side.make_side(short, probe_only=True), short)


def test_without_a_fault_there_is_no_alarm(short, old):
    comparison = compare(old, record(shard_side.make_side(short, probe_only=True), short))
    assert comparison.equal, comparison.verdict()


@pytest.mark.parametrize("name", SUBSET)
def test_fault_is_named_where_it_was_planted(short, old, name):
    fault = FAULTS[name]
    with fault.plant():
        comparison = compare(old, record(shard_side.make_side(short, probe_only=True), short))
    bad = comparison.first_bad
    assert bad is not None, "not detected"
    assert (bad.step, bad.stage) == (fault.step, fault.stage), comparison.verdict()


def test_faults_leave_nothing_behind(short, old):
    """After all of them the clean side is clean again."""
    for fault in FAULTS.values():
        with fault.plant():
            pass
    comparison = compare(old, record(shard_side.make_side(short, probe_only=True), short))
    assert comparison.equal, comparison.verdict()


def test_the_subset_has_a_fault_of_every_stage():
    assert {FAULTS[name].stage for name in SUBSET} == {fault.stage for fault in FAULTS.values()}
