"""What the recorder does with a side, shown with a stack of three lines."""

import numpy as np
import pytest

from kgo_shard.diff.trace import Side, Tape, record, record_states, state_stages


def make_side(step, num_chunks=10, per_chunk=1) -> Side:
    """A stack whose state is one number that every batch adds 1 to."""

    def probe(state, batch):
        return state + batch, {"norm": np.float32(batch), "batch/x": np.full((1, 2), batch)}

    return Side(
        name="toy",
        start=lambda: 0.0,
        chunks=lambda current: iter([[1.0] * per_chunk] * num_chunks),
        probe=probe,
        step=step,
        to_host=lambda state: {"params/w": np.float32(state), "step": np.int64(state)},
    )


def stepped(state, chunk):
    return state + sum(chunk), {"loss": 0.5, "lr": 0.25}


def test_the_trace_begins_with_the_start_state_and_has_one_entry_a_step():
    trace = record(make_side(stepped), Tape({}, [], 3))
    assert [float(entry["parameters/w"]) for entry in trace] == [0, 1, 2, 3]
    assert set(trace[0]) == {"parameters/w", "counts/step"}
    assert set(trace[1]) == {"parameters/w", "counts/step", "norm", "batch/x", "metrics/loss", "learning_rate"}
    assert trace[1]["metrics/loss"].dtype == np.float32


def test_the_state_after_a_call_is_the_training_steps_not_the_probes():
    trace = record(make_side(lambda state, chunk: (state + 100, {"loss": 1.0, "lr": 1.0}), per_chunk=2), Tape({}, [], 4))
    assert [float(entry["parameters/w"]) for entry in trace] == [0, 1, 100, 101, 200]


def test_a_chunk_is_cut_at_the_last_step():
    assert len(record(make_side(stepped, per_chunk=4), Tape({}, [], 6))) == 7


def test_without_a_step_the_probe_goes_on():
    trace = record(make_side(None), Tape({}, [], 2))
    assert [float(entry["parameters/w"]) for entry in trace] == [0, 1, 2]


def test_a_run_that_ends_early_is_an_error():
    for recorder in (record, record_states):
        with pytest.raises(ValueError, match="ends after 2 steps"):
            recorder(make_side(stepped, num_chunks=2), Tape({}, [], 3))


def test_states_alone_have_one_entry_a_call():
    trace = record_states(make_side(stepped, per_chunk=2), Tape({}, [], 4))
    assert [float(entry["parameters/w"]) for entry in trace] == [0, 2, 4]
    assert set(trace[1]) == {"parameters/w", "counts/step", "metrics/loss", "learning_rate"}


def test_a_state_leaf_of_no_stage_is_refused():
    with pytest.raises(KeyError, match="surprise"):
        state_stages({"surprise": np.zeros(1)})
