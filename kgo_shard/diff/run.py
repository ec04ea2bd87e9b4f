"""Both sides through one tape, and the verdict."""

import functools
import math
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import ml_dtypes
import numpy as np
from jax.typing import ArrayLike as Array
from rich.progress import Progress

from ..config import Config, ConfigError
from ..state import learned_shapes
from . import compare, limits, recording, shard_side
from .faults import FAULTS, choose
from .trace import Side, Tape, Trace, record, record_states


def old_stack():
    """The module of the old side. ConfigError where the old stack was deleted, as it may be."""
    if find_spec("legacy_pmap") is None or find_spec("kgo_shard.diff.legacy_side") is None:
        raise ConfigError("the old stack (legacy_pmap and kgo_shard/diff/legacy_side.py) is not here: nothing to compare with")
    from . import legacy_side

    return legacy_side


def diff(
    tape: Tape, exact: bool, fault: str | None = None, progress: Progress | None = None, states_only: bool = False
) -> compare.Comparison:
    """Compare old and new: equal bits in exact mode, else the three-way bound against a float64 run of the old side.

    `states_only` leaves out what happens inside a step, and needs exact mode: the float64 run keeps no metrics in float64 then.
    """
    choose([fault] if fault is not None else None, "--fault", tape.options.get("shard_state", "none"))
    if states_only and not exact:
        raise ConfigError("--states-only needs --exact: in default mode the stages inside a step are judged as well")
    legacy_side = old_stack()
    new = shard_side.make_side(tape)  # first: it checks options and devices before anything is compiled
    old = legacy_side.make_side(tape)
    old_trace = record_shown(old, tape, progress, states_only)
    bound = None if exact else measure_bound(tape, old, progress)
    if fault is None:
        new_trace = record_shown(new, tape, progress, states_only)
    else:
        with FAULTS[fault].plant():
            new_trace = record_shown(shard_side.make_side(tape), tape, progress, states_only)
    return compare.compare(old_trace, new_trace) if bound is None else bound.judge(old_trace, new_trace)


class Bound(NamedTuple):
    """What the three-way bound needs besides the two sides, see `compare.compare`."""

    reference: Trace
    noise: Sequence[Trace]
    coarsest: np.dtype

    def judge(self, old: Trace, new: Trace, numbers: Sequence[int] | None = None) -> compare.Comparison:
        return compare.compare(old, new, self.reference, self.noise, self.coarsest, numbers)


def measure_bound(tape: Tape, old: Side, progress: Progress | None) -> Bound:
    """A float64 run of the tape, a noise run of `old` (the old side here), and the coarsest dtype of the computation."""
    legacy_side, config = old_stack(), Config(**tape.options)
    dtypes = [*map(np.dtype, vars(config.precision).values()), *([np.dtype(ml_dtypes.bfloat16)] if config.optimizer == "muon" else [])]  # its iteration
    with tempfile.TemporaryDirectory() as folder:
        # The float64 run takes the old side's own start: made afresh in float64, it would lack the rounding of its parameters.
        start = with_start(tape, Path(folder))
        reference = record_shown(legacy_side.make_reference(start), start, progress)
    noise = [record_shown(legacy_side.make_perturbed(old, tape), tape, progress)]
    return Bound(reference, noise, functools.reduce(limits.coarser, dtypes))


def with_start(tape: Tape, folder: Path) -> Tape:
    """The tape with a start that others can read: the old side's fresh one in `folder`, where it has none."""
    if tape.checkpoint is not None:
        return tape
    path = folder / recording.CHECKPOINT
    old_stack().save_start(path, tape.options)
    return tape._replace(checkpoint=path)


def run_elsewhere(python: str, folder: Path, exact: bool) -> tuple[Trace, dict[str, Any]]:
    """The trace of the folder's tape through the old stack under another interpreter, and the facts about it.

    Raises ConfigError where that interpreter cannot be started or fails, with the last line that it printed.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [python, str(Path(__file__).with_name("legacy_process.py")), str(folder), out, *(["--exact"] if exact else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": ""}, check=False)
        except OSError as error:
            raise ConfigError(f"{python}: cannot be started as a Python interpreter ({error.strerror})") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise ConfigError(f"{python}: the old stack ended with exit code {done.returncode}: {last}")
        try:
            return recording.read_trace(Path(out))
        except recording.RecordingError:
            raise ConfigError(f"{python}: ended well but left no trace: is it a Python interpreter?") from None


class Drifts(NamedTuple):
    """One tape through the old stack under another interpreter, and through both stacks here."""

    there: str  # the other interpreter's JAX
    migration: compare.Comparison  # old against new, both here
    upgrade: compare.Comparison  # the old stack there against the old stack here
    both: compare.Comparison  # the old stack there against the new one here

    @property
    def exit_code(self) -> int:
        return 0 if all(found.equal for found in (self.migration, self.upgrade, self.both)) else 1


def diff_across(tape: Tape, exact: bool, legacy_python: str, progress: Progress | None = None) -> Drifts:
    """What moving does, and what upgrading JAX does, told apart. The old stack also runs under `legacy_python`.

    Between JAX versions the three-way bound holds, against a float64 run here. Raises ConfigError where the other
    interpreter fails, with the last line that it printed.
    """
    legacy_side = old_stack()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tape = with_start(tape, folder)
        recording.write_tape(folder, tape)
        there, facts = run_elsewhere(legacy_python, folder, exact)
        old = legacy_side.make_side(tape)
        here = record_shown(old, tape, progress)
        new = record_shown(shard_side.make_side(tape), tape, progress)
        bound = measure_bound(tape, old, progress)
    migration = compare.compare(here, new) if exact else bound.judge(here, new)
    return Drifts(facts["JAX"], migration, bound.judge(there, here), bound.judge(there, new))


class Steps(Protocol):
    """Anybody's training step, as `compare_steps` drives it. The state is whatever the step calls so.

    Keys are "<stage>/<leaf>" with a stage of `compare.STAGES`: parameters, moments, reduced_gradient, metrics, ...
    """

    def start(self) -> Any: ...  # the first state
    def step(self, state: Any, batch: Any) -> tuple[Any, dict[str, Array]]: ...  # the next one, and what was computed on the way
    def to_host(self, state: Any) -> dict[str, Array]: ...  # every leaf of a state


def compare_steps(old: Steps, new: Steps, batches: Iterable[Any], reference: Steps | None = None) -> compare.Comparison:
    """The same batches through two steps: equal bits of every leaf, or with a float64 reference the three-way bound.

    Raises CompareError where there are no batches, or a side does not keep to the protocol.
    """
    batches = list(batches)
    if not batches:
        raise compare.CompareError("nothing to compare: there are no batches")

    def run(side):
        def kept(named):
            return {name: np.array(leaf) for name, leaf in named.items()}  # copied: a step may work in place

        state = side.start()
        trace = [kept(side.to_host(state))]
        for batch in batches:
            returned = side.step(state, batch)
            if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
                raise compare.CompareError(f"{type(side).__name__}.step must return (state, dict of arrays), not {type(returned).__name__}")
            state, stages = returned
            trace.append(kept(stages | side.to_host(state)))
        unknown = sorted(name for name in trace[-1] if name.partition("/")[0] not in compare.STAGES)
        if unknown:
            stages = ", ".join(compare.STAGES)
            raise compare.CompareError(f"{type(side).__name__}: {unknown[0]!r} names no stage; names are <stage>/<leaf> with a stage of {stages}")
        return trace

    return compare.compare(run(old), run(new), None if reference is None else run(reference))


def record_shown(side: Side, tape: Tape, progress: Progress | None, states_only: bool = False) -> Trace:
    """`trace.record` (or `record_states`), with a progress bar."""
    record_steps = record_states if states_only else record
    if progress is None:
        return record_steps(side, tape)
    task = progress.add_task(f"{side.name}: compile and run {tape.steps} steps", total=tape.steps)
    return record_steps(side, tape, on_step=lambda: progress.advance(task))


def from_here(path: Path) -> Path:
    """As seen from the project, where it lies in it: a committed report names no machine's folders."""
    root = Path(__file__).resolve().parents[2]
    return path.resolve().relative_to(root) if path.resolve().is_relative_to(root) else path


def tape_facts(tape: Tape) -> dict[str, str]:
    """What a reader of a report must know about the tape."""
    config = Config(**tape.options)
    dtypes = [name for name in Config.__dataclass_fields__ if name.endswith("_dtype")]
    shown = [name for name in tape.options if name not in (*dtypes, "data_parallel", "data_parallel_devices")]
    params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(learned_shapes(config).net))
    return {
        "model": f"{config.model_kind}, pos_len {config.pos_len}, {params / 1e6:.3g} million parameters",
        "mesh": f"{max(1, config.data_parallel_devices)} devices, {config.batch_size} rows a batch, {config.steps_per_jit} steps a call",
        "dtypes": ", ".join(f"{name.removesuffix('_dtype')} {getattr(config, name)}" for name in dtypes),
        "start": str(tape.checkpoint and from_here(tape.checkpoint) or "fresh, from the seed"),
        "steps": str(tape.steps),
        "files": f"{len(tape.files)} in {from_here(tape.files[0].parent)}",
        "options": ", ".join(f"{name}={tape.options[name]}" for name in shown),
    }
