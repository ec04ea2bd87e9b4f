"""--component-profile of both stacks: every part timed, the same parts with the same FLOPs, nothing trained, nothing written."""

import contextlib
import importlib
import io
import re

import legacy_pmap
import pytest
from legacy_pmap.flops import forward_flops

import kgo_shard

STACKS = {"old": legacy_pmap, "new": kgo_shard}
OPTIONS = dict(pos_len=9, batch_size=32, model_kind="b2c32", compute_dtype="float32", component_profile=True, component_profile_repeats=1)
FORWARD = ("stem", "attention", "ffn", "block", "trunk", "heads", "loss", "forward")
BACKWARD = ("stem", "attention", "ffn", "block", "trunk", "objective")
LINE = re.compile(
    r"COMPONENT: name=(?P<name>\w+), pass=(?P<pass>[\w+]+), min=(?P<min>\d+\.\d{3})ms, median=(?P<median>\d+\.\d{3})ms, "
    r"flops=(?P<flops>\d+), TFLOPS=(?P<tflops>\d+\.\d{4})"
)


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def printed(rows9, tmp_path_factory):
    """side -> (state, lines, what lies in the folder of the run afterwards), with gradients; donation must not take the state."""
    folder, found = tmp_path_factory.mktemp("profile"), {}
    for side, stack in STACKS.items():
        config = stack.Config(**OPTIONS, component_profile_grad=True, donate_train_buffers=True, traindir=folder / side, datadir=rows9)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            state = stack.train(config)
        found[side] = state, out.getvalue().splitlines()
    return found, sorted(folder.iterdir())


@pytest.mark.parametrize("side", STACKS)
def test_every_part_is_timed_once_and_its_flops_are_the_specifications(printed, side):
    _, lines = printed[0][side]
    rows = [LINE.fullmatch(line) for line in lines]
    assert all(rows), lines
    expected = [(name, "forward") for name in FORWARD] + [(name, "forward+backward") for name in BACKWARD]
    assert [(row["name"], row["pass"]) for row in rows] == [*expected, ("optimizer", "update"), ("step", "training")]
    assert all(0 < float(row["min"]) <= float(row["median"]) for row in rows)
    flops = {(row["name"], row["pass"]): int(row["flops"]) for row in rows}
    model = 32 * forward_flops(legacy_pmap.Config(pos_len=9, model_kind="b2c32"))["forward"]
    stem, block, heads = (flops[name, "forward"] for name in ("stem", "block", "heads"))
    assert stem + 2 * block + heads == stem + flops["trunk", "forward"] + heads == flops["forward", "forward"] == model
    assert flops["attention", "forward"] + flops["ffn", "forward"] == block
    assert all(flops[name, "forward+backward"] == 3 * flops[name, "forward"] for name in BACKWARD[:-1])
    assert flops["objective", "forward+backward"] == flops["step", "training"] == 3 * model
    assert flops["loss", "forward"] == flops["optimizer", "update"] == 0
    for row in rows:  # FLOPs over the fastest time, as far as four digits show it
        assert abs(float(row["tflops"]) - int(row["flops"]) / float(row["min"]) / 1e9) < 1e-3, row[0]


def test_both_print_the_same_but_for_the_times(printed):
    old, new = ([re.sub(r"(min|median|TFLOPS)=[^,]*", r"\1", line) for line in printed[0][side][1]] for side in STACKS)
    assert old == new


def test_nothing_is_trained_or_written(printed, rows9):
    states, folder = printed
    assert folder == []
    for side, stack in STACKS.items():
        seen, fresh = (stack.to_host(state) for state in (states[side][0], stack.init_state(stack.Config(**OPTIONS))))
        assert all(seen[name].tobytes() == fresh[name].tobytes() for name in fresh), side


def test_without_gradients_only_forward_passes_are_timed(rows9, tmp_path, capsys, monkeypatch):
    for side, stack in STACKS.items():
        module = importlib.import_module(f"{stack.__name__}.profile")
        monkeypatch.setattr(module, "measure", lambda call, repeats: [1.0] * repeats)
        stack.train(stack.Config(**OPTIONS | {"component_profile_repeats": 7}, traindir=tmp_path / side, datadir=rows9))
        rows = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["pass"] for row in rows] == ["forward"] * 8 + ["update", "training"]
        assert not (tmp_path / side).exists()
