"""The old side: `legacy_pmap`, and the only place in this package that imports it. Delete it together with the old stack."""

import dataclasses
from typing import Any

import jax
import legacy_pmap
import numpy as np
from legacy_pmap.step import _compile as compile_step
from legacy_pmap.step import _schedule as make_schedule
from legacy_pmap.step import _stack_batches as stack_batches
from legacy_pmap.step import get_carry, put_state, train_steps
from legacy_pmap.train import VALIDATION_SEED, epoch_chunks

from .trace import Side, Tape


OF_THE_NEW_SIDE_ALONE = {"master_dtype": "param", "objective": "replica"}  # options that change the numbers, and how the old stack is


def old_config(options: dict[str, Any]) -> legacy_pmap.Config:
    """The old stack's options of the same run; what only the new one has and does not change the numbers is left out (how the state is
    split, how many checkpoints are kept). ValueError for what does change them."""
    for name, value in OF_THE_NEW_SIDE_ALONE.items():
        if options.get(name, value) != value:
            raise ValueError(
                f"{name} {options[name]}: the old stack has only {value}, so there is nothing to compare: leave it out "
                "(record and replay in exact mode with --side new need no old stack)"
            )
    known = {field.name for field in dataclasses.fields(legacy_pmap.Config)}
    return legacy_pmap.Config(**{name: value for name, value in options.items() if name in known})


def make_side(tape: Tape, probe_only: bool = False) -> Side:
    config = old_config(tape.options)
    probe = legacy_pmap.make_probe(config)
    devices = config.num_devices

    def start():
        return legacy_pmap.load_checkpoint(tape.checkpoint, config) if tape.checkpoint else legacy_pmap.init_state(config)

    def chunks(current):
        while True:
            yield from epoch_chunks(tape.files, config, current().step)

    def probed(before, batch):
        after, stages = probe(before, batch)
        # Device i gets rows [i * b, (i + 1) * b).
        shards = {f"batch/{key}": value.reshape(devices, -1, *value.shape[1:]) for key, value in batch.items()}
        return after, shards | stages

    evaluate = legacy_pmap.make_eval_step(config)

    def evaluated(state, files):
        quiet = dataclasses.replace(config, symmetry_type="none")
        return evaluate(state, next(legacy_pmap.read_batches(files, quiet, config.seed + state.samples + VALIDATION_SEED)))

    step = None if probe_only else legacy_pmap.make_train_step(config)
    return Side("legacy_pmap", start, chunks, probed, step, legacy_pmap.to_host, evaluated)


def make_reference(tape: Tape, probe_only: bool = False) -> Side:
    """The same side with every float of the step in float64: what the three-way bound measures errors against."""
    with float64():
        side = make_side(tape._replace(options=tape.options | {"compute_dtype": "float64"}), probe_only)

    def inside(function):
        def call(*arguments):
            with float64():
                return function(*arguments)

        return call

    step = None if probe_only else inside(side.step)
    changes = {name: inside(getattr(side, name)) for name in ("start", "probe", "to_host", "evaluate")}
    return side._replace(name="float64", step=step, **changes)


def make_perturbed(side: Side, tape: Tape, seed: int = 0) -> Side:
    """The old side, started from parameters that are one unit in the last place off, up or down. Compiles nothing anew."""
    config, rng = old_config(tape.options), np.random.default_rng(seed)

    def nudge(leaf):
        up = rng.integers(0, 2, leaf.shape).astype(bool)
        return np.nextafter(leaf, np.where(up, np.inf, -np.inf).astype(leaf.dtype))

    def start():
        state = side.start()
        carry = get_carry(state)
        return put_state(config, jax.tree.map(nudge, carry.params), *carry[1:], state.step, state.samples)

    return side._replace(name="legacy_pmap, one ulp off", start=start)


def make_reordered(side: Side, tape: Tape) -> Side:
    """The old side with the devices' shares of every batch in reverse order; what each device made is put back in order."""
    devices = old_config(tape.options).num_devices

    def probed(state, batch):
        shares = {key: value.reshape(devices, -1, *value.shape[1:])[::-1].reshape(value.shape) for key, value in batch.items()}
        after, stages = side.probe(state, shares)
        return after, {name: x[::-1] if name.startswith(("batch/", "loss_terms/", "raw_gradient/")) else x for name, x in stages.items()}

    return side._replace(name="legacy_pmap, devices reversed", probe=probed)


def lower_step(tape: Tape, num_steps: int = 1) -> jax.stages.Lowered:
    """The training step's program for `num_steps` batches, lowered for the tape's devices."""
    config = old_config(tape.options)
    carry = legacy_pmap.init_state(config).carry
    stream = legacy_pmap.read_batches(tape.files, config, config.seed)
    batches = stack_batches([next(stream) for _ in range(num_steps)], config)
    run = compile_step(train_steps, config, (0, 0, 0, None, None, None))
    return run.lower(tuple(carry[:3]), tuple(carry[3:]), batches, *make_schedule(config, 0, num_steps))


def float64():
    """JAX's 64-bit mode, for a while."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # JAX 0.7

    return enable_x64()


def save_start(path, options: dict):
    """A fresh state of the old stack as its own checkpoint file, for both sides to start from."""
    config = old_config(options)
    legacy_pmap.save_checkpoint(path, legacy_pmap.init_state(config), config)


def save_middle(path, options: dict, step: int = 5):
    """A made-up state from the middle of a run: whatever a fresh one has at zero, or equal to something else, is neither."""
    config, rng = old_config(options), np.random.default_rng(0)
    carry = get_carry(legacy_pmap.init_state(config))

    def noise(leaf, scale):
        return (scale * rng.standard_normal(np.shape(leaf))).astype(np.float32)

    m = jax.tree.map(lambda leaf: noise(leaf, 1e-2), carry.opt_state["m"])
    v = jax.tree.map(lambda leaf: noise(leaf, 1e-2) ** 2 if np.ndim(leaf) else leaf, carry.opt_state["v"])  # Muon's are scalar zeros
    ema = None if carry.ema_params is None else jax.tree.map(lambda leaf: leaf + noise(leaf, 1e-3), carry.ema_params)
    state = put_state(config, carry.params, {"m": m, "v": v}, ema, 0.02, 4.9, step, step * config.batch_size)
    legacy_pmap.save_checkpoint(path, state, config)
