"""Old and new ask for the same collectives, and the compiler makes the same of them."""

import pytest

from kgo_shard.diff import collectives, shard_side
from kgo_shard.diff.faults import FAULTS


@pytest.fixture(scope="module")
def audits(tape):
    return collectives.audit(tape)


@pytest.mark.parametrize("form", ["lowered", "compiled"])
def test_kind_count_dtype_and_size_agree(audits, form):
    assert audits[form].equal, audits[form].verdict()
    # One for each of 29 leaves, two moving statistics and the vector of metrics.
    assert sum(audits[form].old.values()) == 32
    assert {c.kind for c in audits[form].old} == {"all_reduce"} and {c.dtype for c in audits[form].old} == {"f32"}
    assert {c.devices for c in audits[form].new} == {8}


@pytest.mark.parametrize("fault", ["gradients_in_bfloat16", "gradients_reduced_twice", "naive_port"])
def test_a_fault_of_the_reduction_shows_in_the_program(audits, tape, fault):
    with FAULTS[fault].plant():
        faulty = collectives.lowered_collectives(shard_side.lower_step(tape).as_text())
    assert not collectives.Audit(audits["lowered"].old, faulty).equal
