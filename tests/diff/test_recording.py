"""A tape and a trace go through a folder unchanged, bfloat16 too; what is not a recording is named."""

import ml_dtypes
import numpy as np
import pytest

from kgo_shard.diff import recording
from kgo_shard.diff.compare import compare
from kgo_shard.diff.trace import Tape


@pytest.fixture
def trace():
    rng = np.random.default_rng(0)
    return [
        {"parameters/blocks/0/w": rng.normal(size=(3, 2)).astype(dtype), "counts/step": np.int64(i), "norm": np.float32(i + 0.1)}
        for i, dtype in enumerate((ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float32))
    ]


def test_a_trace_comes_back_as_it_went(trace, tmp_path):
    recording.write_trace(tmp_path, trace, {"JAX": "9.9", "side": "old", "exact": True})
    back, facts = recording.read_trace(tmp_path)
    assert facts["JAX"] == "9.9" and len(back) == 3
    assert compare(trace, back).equal
    assert back[0]["parameters/blocks/0/w"].dtype == ml_dtypes.bfloat16


def test_a_tape_comes_back_with_its_start(tmp_path, rows9):
    start = tmp_path / "start.pkl"
    start.write_bytes(b"anything")
    train, val = (sorted((rows9 / folder).glob("*.npz")) for folder in ("train", "val"))
    tape = Tape({"pos_len": 9, "ema_decay": 0.9}, train, 7, start, val)
    recording.write_tape(tmp_path / "tape", tape)
    back = recording.read_tape(tmp_path / "tape")
    assert (back.options, [*map(str, back.files)], back.steps) == (tape.options, [str(path.resolve()) for path in tape.files], 7)
    assert back.checkpoint.read_bytes() == b"anything"
    assert [*map(str, back.validation)] == [str(path.resolve()) for path in val] != []


def test_a_tape_without_a_start_is_refused(tmp_path):
    with pytest.raises(recording.RecordingError, match="needs a checkpoint"):
        recording.write_tape(tmp_path, Tape({}, [], 1))


def test_what_is_not_a_recording_is_named(trace, tmp_path):
    with pytest.raises(recording.RecordingError, match="tape.json"):
        recording.read_tape(tmp_path)
    with pytest.raises(recording.RecordingError, match="not a recorded trace"):
        recording.read_trace(tmp_path)
    recording.write_trace(tmp_path, trace, {"JAX": "9.9", "side": "old"})
    with pytest.raises(recording.RecordingError, match="not a recorded trace .KeyError: 'exact'"):
        recording.read_trace(tmp_path)
    path = tmp_path / "trace.npz"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(recording.RecordingError, match=str(tmp_path)):
        recording.read_trace(tmp_path)
