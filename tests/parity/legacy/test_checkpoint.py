"""The original's file: round trip, refusals, and no code from a pickle."""

import os
import pickle

import ml_dtypes
import numpy as np
import pytest

import legacy_pmap as stack
from legacy_pmap.checkpoint import read_checkpoint

from .helpers import assert_same_bits, first_batches, small_config


@pytest.fixture(scope="module")
def trained():
    config = small_config()
    state, _ = stack.make_train_step(config)(stack.init_state(config), first_batches(config, 1))
    return config, state


@pytest.fixture
def saved(trained, tmp_path):
    config, state = trained
    stack.save_checkpoint(tmp_path / "c.pkl", state, config)
    return tmp_path / "c.pkl"


def edited(path, edit):
    payload = pickle.loads(path.read_bytes())
    edit(payload)
    path.write_bytes(pickle.dumps(payload))
    return path


def test_round_trip(trained, saved):
    config, state = trained
    assert_same_bits(stack.to_host(state), stack.to_host(stack.load_checkpoint(saved, config)))
    assert os.listdir(saved.parent) == ["c.pkl"]


def test_layout(trained, saved):
    payload = pickle.loads(saved.read_bytes())
    assert list(payload) == ["params", "opt_state", "meta", "ema_params"] and list(payload["opt_state"]) == ["m", "v"]
    assert isinstance(payload["meta"]["moving_sum"], float) and payload["meta"]["step"] == 1 and payload["meta"]["samples"] == 16
    assert len(payload["meta"]) == 39


def test_bfloat16_round_trip(tmp_path):
    config = small_config(param_dtype="bf16", opt_state_dtype="bf16", ema_decay=0.5)
    state = stack.init_state(config)
    stack.save_checkpoint(tmp_path / "c.pkl", state, config)
    assert read_checkpoint(tmp_path / "c.pkl")["params"]["conv_spatial"]["w"].dtype == ml_dtypes.bfloat16
    assert_same_bits(stack.to_host(state), stack.to_host(stack.load_checkpoint(tmp_path / "c.pkl", config)))


def test_devices_are_interchangeable(trained, saved):
    config = small_config(data_parallel=True, data_parallel_devices=1)
    assert_same_bits(stack.to_host(trained[1]), stack.to_host(stack.load_checkpoint(saved, config)))


def test_missing_ema_starts_from_the_parameters(saved):
    edited(saved, lambda payload: payload.pop("ema_params"))
    flat = stack.to_host(stack.load_checkpoint(saved, small_config()))
    for name in [name for name in flat if name.startswith("ema_params/")]:
        assert np.array_equal(flat[name], flat["params/" + name[11:]])


@pytest.mark.parametrize("edit, words", [
    (lambda p: p["meta"].update(pos_len=19), ["pos_len", "19", "9"]),
    (lambda p: p["meta"].update(optimizer="muon"), ["optimizer", "muon", "adamw"]),
    (lambda p: p["meta"].update(muon_target="ffn"), ["muon_target", "ffn", "all"]),
    (lambda p: p["meta"].update(stack_blocks=True), ["stack_blocks", "True", "False"]),
    (lambda p: p["meta"].update(int8_train=True), ["int8_train", "True", "False"]),
    (lambda p: p["meta"].update(int8_fwd_bits=4), ["int8_fwd_bits", "4", "8"]),
    (lambda p: p["meta"]["model_config"].update(hidden_size=64), ["model_config", "64", "32"]),
    (lambda p: p["meta"].pop("pos_len"), ["meta/pos_len", "missing"]),
    (lambda p: p["meta"].pop("step"), ["meta/step"]),
    (lambda p: p["meta"].update(moving_sum=float("nan")), ["moving_sum"]),
    (lambda p: p.pop("opt_state"), ["opt_state", "missing"]),
    (lambda p: p["opt_state"].pop("v"), ["opt_state/v", "missing"]),
    (lambda p: p["params"]["blocks"][0].pop("q_proj"), ["params/blocks/0/q_proj/w", "missing"]),
    (lambda p: p["params"].update(extra={"w": np.zeros(2, np.float32)}), ["params/extra/w"]),
    (lambda p: p["params"].update(blocks=tuple(p["params"]["blocks"])), ["params", "nested"]),
    (lambda p: p["params"]["norm_final"].update(weight=np.ones((4, 32), np.float32)), ["norm_final/weight", "(4, 32)", "(32,)"]),
    (lambda p: p["params"]["norm_final"].update(weight="ones"), ["norm_final/weight", "floats"]),
])
def test_misfits_are_refused(saved, edit, words):
    edited(saved, edit)
    with pytest.raises(stack.CheckpointError) as error:
        stack.load_checkpoint(saved, small_config())
    assert all(word in str(error.value) for word in [str(saved), *words]), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_truncated_files_are_refused(saved, keep):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(stack.CheckpointError, match="truncated"):
        stack.load_checkpoint(saved, small_config())


class Runs:
    """Unpickling this calls a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function, name", [(os.system, "system"), (eval, "eval"), (np.load, "load")])
def test_code_in_a_pickle_is_not_run(saved, tmp_path, function, name):
    marker = tmp_path / "marker"
    argument = {"eval": f"open({str(marker)!r}, 'w')", "load": str(saved)}.get(name, f"touch {marker}")
    edited(saved, lambda payload: payload.update(evil=Runs(function, argument)))
    with pytest.raises(stack.CheckpointError, match=name):
        stack.load_checkpoint(saved, small_config())
    assert not marker.exists()


def test_numpy_1_spelling_is_read(saved):
    """NumPy 1 wrote numpy.core.multiarray where NumPy 2 writes numpy._core.multiarray; protocol 2 keeps the names as text."""
    payload = pickle.loads(saved.read_bytes())
    data = pickle.dumps(payload, protocol=4)
    old = data.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
    assert old != data
    # Frames carry their length: drop them, they are optional.
    out, i = bytearray(), 0
    import pickletools
    cuts = [(position, position + 9) for op, _, position in pickletools.genops(data) if op.name == "FRAME"]
    for start, end in cuts:
        out += data[i:start]
        i = end
    out += data[i:]
    saved.write_bytes(bytes(out).replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray"))
    read = read_checkpoint(saved)
    assert np.array_equal(read["params"]["conv_spatial"]["w"], payload["params"]["conv_spatial"]["w"])
