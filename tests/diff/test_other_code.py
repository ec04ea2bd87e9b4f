"""The harness on a step that is not ours: the documented example, its wrong port, and what the protocol refuses."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from kgo_shard.diff.compare import CompareError
from kgo_shard.diff.run import compare_steps

PATH = Path(__file__).parents[2] / "examples" / "mlp_migration.py"
spec = importlib.util.spec_from_file_location("mlp_migration", PATH)
example = importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module", autouse=True)
def loaded(monkeypatch_module):
    spec.loader.exec_module(example)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.config.update", lambda *_: None)  # the test process has its devices already
        yield patch


def test_the_port_equals_the_original_in_every_bit(capsys):
    assert example.main([]) == 0
    assert "EQUAL" in capsys.readouterr().out


def test_the_naive_port_is_caught_at_its_gradient(capsys):
    assert example.main(["--naive"]) == 1
    out = capsys.readouterr().out
    assert "first at step 1, stage reduced_gradient" in out


class Counter:
    """A step of three lines."""

    def __init__(self, by):
        self.by = by

    def start(self):
        return np.float32(0)

    def step(self, state, batch):
        return np.float32(state + self.by * batch), {"metrics/loss": np.float32(batch)}

    def to_host(self, state):
        return {"parameters/w": state}


def test_two_steps_that_agree_and_two_that_do_not():
    assert compare_steps(Counter(1), Counter(1.0), [1, 2]).equal
    found = compare_steps(Counter(1), Counter(1.5), [1, 2]).first_bad
    assert (found.step, found.name) == (1, "parameters/w")


def test_nothing_to_compare_is_refused():
    class Empty(Counter):
        def to_host(self, state):
            return {}

    assert "holds no leaf" in compare_steps(Empty(1), Empty(1), [1]).first_bad.reason
    with pytest.raises(CompareError, match="there are no batches"):
        compare_steps(Counter(1), Counter(1), [])


def test_what_is_not_the_protocol_is_named():
    class Bare(Counter):
        def step(self, state, batch):
            return state

    class Unnamed(Counter):
        def to_host(self, state):
            return {"w": state}

    with pytest.raises(CompareError, match=r"Bare.step must return \(state, dict of arrays\), not float32"):
        compare_steps(Counter(1), Bare(1), [1])
    with pytest.raises(CompareError, match="Unnamed: 'w' names no stage"):
        compare_steps(Unnamed(1), Counter(1), [1])


def test_a_step_that_works_in_place_is_seen_as_it_was_after_every_step():
    class InPlace(Counter):
        def start(self):
            return np.zeros(2, np.float32)

        def step(self, state, batch):
            state += batch * self.by
            self.by = 1
            return state, {}

    assert compare_steps(InPlace(1), InPlace(1), [1, 2]).equal
    assert compare_steps(InPlace(1), InPlace(3), [1, -2, 1]).first_bad.step == 1
