"""The component profile: every part of the step timed on one batch, and nothing else done. Equality with the old one: tests/parity."""

import re
import time

import jax.numpy as jnp
import numpy as np

from kgo_shard.config import Config
from kgo_shard.flops import forward_flops
from kgo_shard.profile import compiled, component_line, measure, with_backward
from kgo_shard.state import init_state, to_host
from kgo_shard.train import train

OPTIONS = dict(pos_len=9, batch_size=32, model_kind="b2c32", compute_dtype="float32", component_profile=True, component_profile_repeats=1)
LINE = re.compile(
    r"COMPONENT: name=(\w+), pass=([\w+]+), min=(\d+\.\d{3})ms, median=(\d+\.\d{3})ms, flops=(\d+), TFLOPS=\d+\.\d{4}"
)


def test_every_part_is_timed_and_nothing_is_trained_or_written(rows9, tmp_path):
    config = Config(**OPTIONS, component_profile_grad=True, donate_train_buffers=True, traindir=tmp_path / "run", datadir=rows9)
    lines = []
    state = train(config, log=lines.append)
    rows = [LINE.fullmatch(line).groups() for line in lines]
    forward = ["stem", "attention", "ffn", "block", "trunk", "heads", "loss", "forward"]
    backward = ["stem", "attention", "ffn", "block", "trunk", "objective"]
    expected = [(name, "forward") for name in forward] + [(name, "forward+backward") for name in backward]
    assert [row[:2] for row in rows] == [*expected, ("optimizer", "update"), ("step", "training")]
    assert all(0 < float(best) <= float(median) for _, _, best, median, _ in rows)
    flops = {(name, what): int(count) for name, what, _, _, count in rows}
    parts = forward_flops(config.model) | {"loss": 0}
    assert all(flops[name, "forward"] == 32 * parts[name] for name in forward)
    assert all(flops[name, "forward+backward"] == 96 * parts[name] for name in backward[:-1])
    assert flops["objective", "forward+backward"] == flops["step", "training"] == 96 * parts["forward"]
    assert list(tmp_path.iterdir()) == []
    seen, fresh = to_host(state), to_host(init_state(config))  # also not taken by a step that consumes its state
    assert all(seen[name].tobytes() == fresh[name].tobytes() for name in fresh)


def test_a_measurement_is_the_repeats_without_the_first_call(monkeypatch):
    clock = [0.0]
    durations = iter([100.0, 3.0, 1.0, 2.0])  # the first call compiles

    def call():
        clock[0] += next(durations)
        return jnp.zeros(())

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert measure(call, 3) == [3.0, 1.0, 2.0]


def test_a_line_has_the_fastest_repeat_and_the_median():
    line = component_line("attention", "forward", [0.003, 0.001, 0.002], 4 * 10**9)
    assert line == "COMPONENT: name=attention, pass=forward, min=1.000ms, median=2.000ms, flops=4000000000, TFLOPS=4.0000"


def test_the_backward_pass_is_that_of_the_first_argument_only():
    value, (gradient,) = compiled(with_backward(lambda x, y: x * x * y), jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0]))()
    np.testing.assert_array_equal(value, [20, 63])
    np.testing.assert_array_equal(gradient, [20 * 2 * 2 * 5, 63 * 2 * 3 * 7])  # the value is the cotangent
