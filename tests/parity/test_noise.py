"""The noise floor is noise: small, not zero, and nothing of it where nothing is computed."""

import pytest

from kgo_shard.diff import legacy_side, noise
from kgo_shard.diff.compare import compare
from kgo_shard.diff.trace import record


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def floor(tape):
    side = legacy_side.make_side(tape, probe_only=True)
    return noise.measure(tape, side, record(side, tape))


def test_only_what_is_computed_is_noisy(floor):
    for found in (noise.largest(comparison) for comparison in floor.values()):
        assert found["batch"] == found["counts"] == found["learning_rate"] == 0
        for stage in ("reduced_gradient", "moments", "parameters", "ema", "metrics"):
            assert 0 < found[stage] < 0.1, stage


def test_each_device_makes_the_same_whatever_its_place(floor):
    """With the devices reversed only what is summed over them changes, in the first step."""
    first = [leaf for leaf in floor["reordered"].leaves if leaf.step == 1]
    assert all(leaf.equal_bits for leaf in first if leaf.stage in ("batch", "loss_terms", "raw_gradient"))
    assert not all(leaf.equal_bits for leaf in first if leaf.stage == "reduced_gradient")


def test_the_table_says_where_old_and_new_lie(floor, old_trace, new_trace):
    section = noise.noise_section(floor, compare(old_trace, new_trace))
    assert {row[-1] for row in section["rows"]} == {"equal"} and "within the noise in every stage" in section["verdict"]
    worse = noise.noise_section({name: compare(old_trace, new_trace) for name in floor}, floor["perturbed"])
    assert "above the noise in" in worse["verdict"] and "reduced_gradient" in worse["verdict"]
