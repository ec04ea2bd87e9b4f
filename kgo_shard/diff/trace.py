"""Run one side through a tape and record every stage of every step under canonical names.

A side is anything that can start, step and say what it did; `shard_side.py` and `legacy_side.py` make the two that this
project is about. A trace is a list with one flat dict for each step, the start state first; `compare.py` reads it.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STATE_STAGES = (  # prefix of a key of `to_host` -> stage
    ("params/", "parameters/"),
    ("opt_state/", "moments/"),
    ("ema_params/", "ema/"),
    ("moving_", "moving_statistics/"),
    ("step", "counts/step"),
    ("samples", "counts/samples"),
)

Trace = list[dict[str, np.ndarray]]  # for each step "<stage>/<leaf>" -> array; the start state first


class Tape(NamedTuple):
    """What both sides are given: the options of the run, its training files, where it starts, and for how long."""

    options: dict[str, Any]
    files: Sequence[Path]
    steps: int
    checkpoint: Path | None = None  # None: a fresh start from the seed
    validation: Sequence[Path] = ()  # files of which the last state evaluates one batch; none: no evaluation


class Side(NamedTuple):
    """One training stack, as the recorder drives it. `state` is whatever the stack calls so."""

    name: str
    start: Callable[[], Any]  # -> state
    chunks: Callable[[Callable[[], Any]], Iterator[list]]  # current state -> lists of batches, one list a compiled call
    probe: Callable[[Any, Any], tuple[Any, dict[str, np.ndarray]]]  # one step that shows its stages
    step: Callable[[Any, list], tuple[Any, dict[str, float]]] | None  # the training step itself; None: only the probe runs
    to_host: Callable[[Any], dict[str, np.ndarray]]
    evaluate: Callable[[Any, Sequence[Path]], dict[str, float]] | None = None  # the run's first batch of validation


def record(side: Side, tape: Tape, on_step: Callable[[], None] = lambda: None) -> Trace:
    """The trace of `tape.steps` steps.

    Inner stages come from the probe. The state and the metrics after each compiled call come from the training step, so
    with K steps a call every K-th entry holds what K scanned steps made, and the entries between hold the probe's.
    Raises ValueError where the run of the tape ends before its steps.
    """
    state = side.start()
    trace = [state_stages(side.to_host(state))]
    for chunk in side.chunks(lambda: state):
        chunk = chunk[: tape.steps + 1 - len(trace)]
        probed = state
        for batch in chunk:
            probed, stages = side.probe(probed, batch)
            trace.append(stages | state_stages(side.to_host(probed)))
            on_step()
        if side.step is None:
            state = probed
        else:
            state, metrics = side.step(state, chunk)
            trace[-1] |= state_stages(side.to_host(state)) | metric_stages(metrics, trace[-1]["norm"].dtype)
        if len(trace) > tape.steps:
            if tape.validation:
                trace[-1] |= metric_stages(side.evaluate(state, tape.validation), trace[-1]["norm"].dtype, "evaluation")
            return trace
    raise ValueError(f"the run ends after {len(trace) - 1} steps, before the {tape.steps} that are compared: raise max_training_samples")


def record_states(side: Side, tape: Tape, on_step: Callable[[], None] = lambda: None) -> Trace:
    """The trace of the training step alone: state and metrics after every compiled call, without what happens inside a step.

    Half the programs to compile. A call's last step may lie beyond the tape's. Raises ValueError as `record` does.
    """
    state, done = side.start(), 0
    trace = [state_stages(side.to_host(state))]
    for chunk in side.chunks(lambda: state):
        state, metrics = side.step(state, chunk)
        trace.append(state_stages(side.to_host(state)) | metric_stages(metrics, np.float32))
        done += len(chunk)
        on_step()
        if done >= tape.steps:
            return trace
    raise ValueError(f"the run ends after {done} steps, before the {tape.steps} that are compared: raise max_training_samples")


def state_stages(host: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves of `to_host` under the names of their stages."""

    def stage_name(key):
        for prefix, stage in STATE_STAGES:
            if key.startswith(prefix):
                return stage + (key.removeprefix(prefix) if prefix.endswith(("/", "_")) else "")
        raise KeyError(f"{key} belongs to no stage: give it a row in STATE_STAGES")

    return {stage_name(key): np.asarray(value) for key, value in host.items()}


def metric_stages(metrics: dict[str, float], dtype, stage: str = "metrics") -> dict[str, np.ndarray]:
    """Metrics of the training step; a float32 that went through a Python float is itself again."""
    return {"learning_rate" if name == "lr" else f"{stage}/{name}": np.asarray(value, dtype) for name, value in metrics.items()}
