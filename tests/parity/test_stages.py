"""Old equals new, bit for bit, stage by stage, in the order in which a step makes them."""

import numpy as np
import pytest

from kgo_shard.diff.compare import STAGES, compare
from kgo_shard.diff.trace import record
from kgo_shard.diff import shard_side

START_STAGES = {"moments", "parameters", "ema", "moving_statistics", "counts"}


@pytest.fixture(scope="module")
def comparison(old_trace, new_trace):
    return compare(old_trace, new_trace)


@pytest.mark.parametrize("stage", STAGES)
def test_every_leaf_of_the_stage_has_equal_bits(comparison, stage):
    leaves = [leaf for leaf in comparison.leaves if leaf.stage == stage]
    expected_steps = {0, 1, 2, 3} if stage in START_STAGES else {3} if stage == "evaluation" else {1, 2, 3}
    assert {leaf.step for leaf in leaves} == expected_steps
    assert [(leaf.name, leaf.reason) for leaf in leaves if not leaf.equal_bits] == []


def test_nothing_is_compared_that_never_changes(old_trace):
    """A stage whose leaves were all zero, or the same in every step, would prove nothing."""
    for stage in ("raw_gradient", "moments", "parameters", "ema", "moving_statistics", "metrics", "learning_rate", "counts"):
        names = [name for name in old_trace[1] if name == stage or name.startswith(stage + "/")]
        assert names
        constant = [name for name in names if np.array_equal(old_trace[1][name], old_trace[2][name])]
        # A gradient, a moment or a parameter moves in every step; of the metrics the sum of weights may stand still, the
        # accuracy, and the lead's loss, where no row of either batch has a lead target.
        assert set(constant) <= {"metrics/wsum", "metrics/pacc1", "metrics/leadloss"}, (stage, constant)


def test_devices_have_different_rows_and_gradients(old_trace):
    """Else a missing reduction would not show."""
    gradient = old_trace[1]["raw_gradient/blocks/0/q_proj/w"]
    assert len({part.tobytes() for part in gradient}) == 8
    assert len({part.tobytes() for part in old_trace[1]["batch/binaryInputNCHW"]}) == 8
    assert old_trace[1]["moving_statistics/sum"] > 0, "the first batch must have unowned points, or the seki weight is not tested"


def test_the_probe_is_the_step(tape, new_trace):
    """The stages come from the probe: with the probe alone the same states come out, bit for bit."""
    probed = record(shard_side.make_side(tape, probe_only=True), tape)
    state = [name for name in probed[0]]
    assert [(i, name) for i in range(4) for name in state if probed[i][name].tobytes() != new_trace[i][name].tobytes()] == []
