"""One training step, its scan over K batches, evaluation, gradient and probe, on one device (jit) or D devices (pmap) (spec, section 4).

`step_body` is the step; everything that trains or inspects runs it. With `data_parallel` every array of the state carries a
leading device axis, as the original's does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import AXIS, dtypes_of
from .losses import METRICS, objective
from .model import HEADS, forward, init_params, make_tables
from .optim import clip, flatten, global_norm, init_opt_state, learning_rate, update, update_ema


class Carry(NamedTuple):
    """What one step hands to the next, on the devices. `ema_params` is None without EMA; moving_*: scalars in the full dtype."""

    params: Any
    opt_state: Any
    ema_params: Any
    moving_sum: Any
    moving_weight: Any


class State(NamedTuple):
    """A run's state: the carry (with a leading device axis when data_parallel) and the host's counters."""

    carry: Carry
    step: int
    samples: int


# ------------------------------------------------------------------------------------------------- host <-> devices


def devices_of(config):
    return jax.local_devices()[: config.num_devices]


def put_state(config, params, opt_state, ema_params, moving_sum, moving_weight, step, samples):
    """Host trees (no device axis) -> State on the devices, cast to the configured dtypes. Never aliases: each leaf is its own copy."""
    dtypes = dtypes_of(config)

    def cast(tree, dtype):
        return jax.tree_util.tree_map(lambda x: np.array(x, dtype), tree)

    carry = Carry(cast(params, dtypes.param), cast(opt_state, dtypes.opt_state), cast(ema_params, dtypes.full),
                  np.asarray(moving_sum, dtypes.full), np.asarray(moving_weight, dtypes.full))
    if config.data_parallel:
        # In place of jax.device_put_replicated, which newer releases lack; this form works on all of them.
        mesh = jax.sharding.Mesh(np.array(devices_of(config)), (AXIS,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
        put = lambda x: jax.device_put(np.broadcast_to(x[None], (config.num_devices, *x.shape)), sharding)
    else:
        put = jnp.array
    return State(jax.tree_util.tree_map(put, carry), int(step), int(samples))


def first_replica(array, config):
    """One replica's value as ndarray, read from the first device's shard: `array[0]` would be a gather on new JAX."""
    if not config.data_parallel:
        return np.asarray(array)
    return np.asarray(array.addressable_shards[0].data).reshape(array.shape[1:])


def get_carry(state):
    """The State's carry as NumPy trees without a device axis."""
    replicated = state.carry.moving_sum.ndim == 1
    read = lambda x: np.asarray(x.addressable_shards[0].data).reshape(x.shape[1:]) if replicated else np.asarray(x)
    return jax.tree_util.tree_map(read, state.carry)


def init_state(config):
    """A fresh State from config.seed: zero moments and statistics, EMA (when on) a copy of the parameters.

    Raises ValueError when compute_dtype is float64 outside JAX's 64-bit mode.
    """
    params = init_params(config)
    ema = params if config.ema_decay > 0.0 else None
    return put_state(config, params, init_opt_state(params, config), ema, 0.0, 0.0, 0, 0)


def to_host(state):
    """Flat dict of ndarrays: params/..., opt_state/m/..., opt_state/v/..., ema_params/... (only with EMA), moving_sum,
    moving_weight (full dtype scalars), step, samples (int64 scalars)."""
    carry = get_carry(state)
    flat = {**flatten(carry.params, "params/"), **flatten(carry.opt_state, "opt_state/")}
    if carry.ema_params is not None:
        flat.update(flatten(carry.ema_params, "ema_params/"))
    return {**flat, "moving_sum": carry.moving_sum, "moving_weight": carry.moving_weight,
            "step": np.asarray(state.step, np.int64), "samples": np.asarray(state.samples, np.int64)}


_BATCH_KEYS = ("binaryInputNCHW", "globalInputNC", "policyTargetsNCMove", "globalTargetsNC", "scoreDistrN", "valueTargetsNCHW")


def _stack_batches(batches, config):
    """K batches -> dict of (K,B,...) arrays, or (D,K,b,...): device i gets rows [i*b, (i+1)*b)."""
    if not batches:
        raise ValueError("step needs at least one batch")
    for batch in batches:
        for key in _BATCH_KEYS:
            if key not in batch:
                raise ValueError(f"batch lacks key {key}")
            if batch[key].shape[0] != config.batch_size:
                raise ValueError(f"batch key {key} has {batch[key].shape[0]} rows, but option batch_size={config.batch_size}")
    stacked = {key: np.stack([np.asarray(batch[key]) for batch in batches]) for key in _BATCH_KEYS}
    if not config.data_parallel:
        return stacked
    count = config.num_devices
    return {key: np.swapaxes(array.reshape(array.shape[0], count, -1, *array.shape[2:]), 0, 1) for key, array in stacked.items()}


def _one_batch(batch, config):
    """A single batch without the K axis: (B,...) or (D,b,...)."""
    return {key: array[:, 0] if config.data_parallel else array[0] for key, array in _stack_batches([batch], config).items()}


def _named(vector):
    return {name: float(value) for name, value in zip(METRICS, vector)}


# ---------------------------------------------------------------------------------------------------------- collectives


def _pmean(tree, axis):
    return tree if axis is None else jax.lax.pmean(tree, axis)


def _sum_metrics(metrics, axis):
    """Sum over replicas, entry 0 (the loss) divided by D: the other 25 are sums over rows."""
    if axis is None:
        return metrics
    metrics = jax.lax.psum(metrics, axis)
    return metrics.at[0].set(metrics[0] / jax.lax.psum(1, axis))


# ------------------------------------------------------------------------------------------------------------- the step


def local_gradient(params, batch, moving_sum, moving_weight, tables, config):
    """Gradient of the replica's own loss. Returns (grads, metrics (26,), new moving sum, new moving weight), nothing reduced."""
    loss = functools.partial(objective, tables=tables, config=config, training=True)
    grads, (metrics, moving_sum, moving_weight) = jax.grad(loss, has_aux=True)(params, batch, moving_sum, moving_weight)
    return grads, metrics, moving_sum, moving_weight


def step_body(carry, inputs, *, tables, config, axis):
    """One optimizer step on one replica. inputs: (batch, t, lr, wd), t counting from 1. Returns (new carry, stages)."""
    batch, t, lr, wd = inputs
    moving, stages = gradient_half(carry, batch, tables=tables, config=config, axis=axis)
    return update_half(carry, stages["clip"], moving, t, lr, wd, config), {**stages, "learning_rate": lr}


def gradient_half(carry, batch, *, tables, config, axis):
    """What depends on the rows: (new moving sum and weight, stages)."""
    local, local_metrics, moving_sum, moving_weight = local_gradient(carry.params, batch, carry.moving_sum, carry.moving_weight,
                                                                     tables, config)
    reduced = _pmean(local, axis)
    metrics = _sum_metrics(local_metrics, axis)
    moving_sum, moving_weight = _pmean((moving_sum, moving_weight), axis)
    norm = global_norm(reduced, config) if config.uses_norm else jnp.zeros((), dtypes_of(config).full)
    clipped = clip(reduced, norm, config.grad_clip_norm) if config.grad_clip_norm > 0.0 else reduced
    stages = {"loss_terms": local_metrics, "raw_gradient": local, "reduced_gradient": reduced, "norm": norm, "clip": clipped,
              "metrics": metrics}
    return (moving_sum, moving_weight), stages


def update_half(carry, grads, moving, t, lr, wd, config):
    params, opt_state = update(carry.params, grads, carry.opt_state, t, lr, wd, config)
    ema = None if carry.ema_params is None else update_ema(carry.ema_params, params, config)
    return Carry(params, opt_state, ema, *moving)


def train_steps(big, moving, batches, t, lr, wd, *, tables, config, axis):
    """K steps as one scan. Returns (carry, metrics (26,) summed over K, norm summed over K).

    `big` = (params, opt_state, ema_params) is what the original donates; the two moving scalars come apart.
    """

    def body(sums, inputs):
        carry, metrics, norm = sums
        carry, stages = step_body(carry, inputs, tables=tables, config=config, axis=axis)
        # Summed in the loop, in order: a sum over stacked results is ordered by the compiler, and differs between releases.
        return (carry, metrics + stages["metrics"], norm + stages["norm"]), None

    full = dtypes_of(config).full
    start = (Carry(*big, *moving), jnp.zeros(len(METRICS), full), jnp.zeros((), full))
    return jax.lax.scan(body, start, (batches, t, lr, wd))[0]


def _schedule(config, step, count):
    """Step numbers from 1, learning rates, weight decays of `count` steps: computed as Python doubles, rounded once."""
    full = dtypes_of(config).full
    t = np.asarray([step + i + 1 for i in range(count)], full)
    lr = np.asarray([learning_rate(step + i, config) for i in range(count)], full)
    return t, lr, np.full(count, config.wd, full)


def _compile(function, config, in_axes, donate=()):
    """jit on one device, pmap over the data axis on D; `in_axes` as pmap's (0: a slice a device, None: broadcast)."""
    function = functools.partial(function, tables=make_tables(config), config=config, axis=AXIS if config.data_parallel else None)
    if not config.data_parallel:
        return jax.jit(function, donate_argnums=donate)
    return jax.pmap(function, axis_name=AXIS, in_axes=in_axes, donate_argnums=donate, devices=devices_of(config))


def _compile_apart(config, donate):
    """`train_steps` with Muon's update as a compiled call of its own (--muon-split-jit): one device, two calls a step."""

    def first(carry, batches, *, tables, config, axis):
        def one(_, batch):  # a scan of one, as in the whole step
            moving, stages = gradient_half(carry, batch, tables=tables, config=config, axis=axis)
            return None, (stages["clip"], moving, stages["metrics"], stages["norm"])

        return jax.tree_util.tree_map(lambda x: x[0], jax.lax.scan(one, None, batches)[1])

    def second(big, old_moving, grads, moving, t, lr, wd, *, tables, config, axis):
        return update_half(Carry(*big, *old_moving), grads, moving, t, lr, wd, config)

    gradient, update_params = _compile(first, config, None), _compile(second, config, None, donate)

    def run(big, moving, batches, t, lr, wd):
        carry, full = Carry(*big, *moving), dtypes_of(config).full
        metrics, norm = jnp.zeros(len(METRICS), full), jnp.zeros((), full)
        for k in range(len(t)):
            grads, moving, step_metrics, step_norm = gradient(carry, {key: array[k : k + 1] for key, array in batches.items()})
            carry = update_params(tuple(carry[:3]), tuple(carry[3:]), grads, moving, t[k], lr[k], wd[k])
            metrics, norm = metrics + step_metrics, norm + step_norm
        return carry, metrics, norm

    return run


def make_train_step(config):
    """Builds step(state, [batch, ...]) -> (state, metrics): K batches, K updates, one compiled call, one trace per K (with
    muon_split_jit two calls an update).

    metrics: the 26 metrics and grad_norm summed over the K steps (loss already divided by D; grad_norm 0.0 when neither logged
    nor clipping), and lr of the last step, as Python floats. With donate_train_buffers the given state's arrays are consumed.
    `submitted(outputs)`, where given, is called once the work is on its way, before the wait for the metrics.
    Raises ValueError for no batch, a missing key, or another number of rows than batch_size.
    """
    donate = (0,) if config.donate_train_buffers else ()
    run = _compile_apart(config, donate) if config.splits_update else _compile(train_steps, config, (0, 0, 0, None, None, None), donate)

    def step(state, batches, submitted=None):
        batches = list(batches)
        stacked = _stack_batches(batches, config)
        t, lr, wd = _schedule(config, state.step, len(batches))
        outputs = carry, metrics, norm = run(tuple(state.carry[:3]), tuple(state.carry[3:]), stacked, t, lr, wd)
        if submitted is not None:
            submitted(outputs)
        named = _named(first_replica(metrics, config))
        named.update(grad_norm=float(first_replica(norm, config)), lr=float(lr[-1]))
        return State(carry, state.step + len(batches), state.samples + len(batches) * config.batch_size), named

    return step


# ----------------------------------------------------------------------------------------- evaluation, gradient, probe


def eval_step(params, batch, *, tables, config, axis):
    zero = jnp.zeros((), dtypes_of(config).full)
    metrics = objective(params, batch, zero, zero, tables, config, training=False)[1][0]
    return _sum_metrics(metrics, axis)


def _as_constants(function, config, state, batch, moving):
    """Compiles `function(params, batch, moving, ...)` anew with the moving statistics (on one device also the batch) as constants
    and runs it: the way the recordings' values.npz was taken. As arguments, sums over 32 rows differ by 1e-7."""
    moving = tuple(first_replica(value, config) for value in moving)
    if config.data_parallel:
        closed = lambda params, batch, **static: function(params, batch, moving, **static)
        return _compile(closed, config, (0, 0))(state.carry.params, batch)
    closed = lambda params, **static: function(params, batch, moving, **static)
    return _compile(closed, config, (0,))(state.carry.params)


def make_eval_step(config, *, constants=False):
    """Builds evaluate(state, batch) -> the 26 metrics as floats, from the live parameters; the state is untouched.

    `constants=True` compiles every call anew around the batch, see `_as_constants`.
    """
    run = _compile(eval_step, config, (0, 0))

    def evaluate(state, batch):
        batch = _one_batch(batch, config)
        if constants:
            metrics = _as_constants(lambda params, batch, _, **static: eval_step(params, batch, **static), config, state, batch, ())
        else:
            metrics = run(state.carry.params, batch)
        return _named(first_replica(metrics, config))

    return evaluate


def gradient_step(params, batch, moving, *, tables, config, axis):
    grads, metrics, moving_sum, moving_weight = local_gradient(params, batch, *moving, tables, config)
    return _pmean(grads, axis), _sum_metrics(metrics, axis), _pmean((moving_sum, moving_weight), axis)


def make_gradient(config, *, constants=False):
    """Builds gradient(state, batch) -> (flat dict of reduced gradients before clipping, metrics).

    metrics: the 26, and moving_sum and moving_weight as they would become. `constants=True` compiles every call anew, see
    `_as_constants`.
    """
    run = _compile(gradient_step, config, (0, 0, 0))

    def gradient(state, batch):
        batch, moving = _one_batch(batch, config), tuple(state.carry[3:])
        if constants:
            grads, metrics, moving = _as_constants(gradient_step, config, state, batch, moving)
        else:
            grads, metrics, moving = run(state.carry.params, batch, moving)
        named = _named(first_replica(metrics, config))
        named.update(zip(("moving_sum", "moving_weight"), (float(first_replica(value, config)) for value in moving)))
        return {name: first_replica(leaf, config) for name, leaf in flatten(grads).items()}, named

    return gradient


def make_probe(config):
    """Builds probe(state, batch) -> (state, stages): one step by the train step's own body, keeping every intermediate stage.

    stages: loss_terms/<metric> (D,) before the psum; raw_gradient/<leaf> (D,*shape) before the pmean; reduced_gradient/<leaf>;
    norm (); clip/<leaf>, the gradient handed to the optimizer; metrics/<metric> after the psum; learning_rate (). D = 1 on one device.
    """

    def one(carry, batches, t, lr, wd, **static):
        # A scan of one step, as the train step's is: outside a loop the compiler may lay out a convolution otherwise.
        carry, stages = jax.lax.scan(functools.partial(step_body, **static), carry, (batches, t, lr, wd))
        return carry, jax.tree_util.tree_map(lambda x: x[0], stages)

    run = _compile(one, config, (0, 0, None, None, None))

    def every(array):
        return np.asarray(array) if config.data_parallel else np.asarray(array)[None]

    def probe(state, batch):
        carry, out = run(state.carry, _stack_batches([batch], config), *_schedule(config, state.step, 1))
        first = lambda array: first_replica(array, config)
        stages = {f"loss_terms/{name}": every(out["loss_terms"])[:, i] for i, name in enumerate(METRICS)}
        stages.update({name: every(leaf) for name, leaf in flatten(out["raw_gradient"], "raw_gradient/").items()})
        for stage in ("reduced_gradient", "clip"):
            stages.update({name: first(leaf) for name, leaf in flatten(out[stage], stage + "/").items()})
        stages.update({f"metrics/{name}": np.asarray(value) for name, value in zip(METRICS, first(out["metrics"]))})
        stages.update(norm=first(out["norm"]), learning_rate=first(out["learning_rate"]))
        return State(carry, state.step + 1, state.samples + config.batch_size), stages

    return probe


def head_outputs(state, batch, config):
    """The nine head outputs of all rows, on one device: dict name -> ndarray in the full dtype (see model.forward for shapes)."""
    params = jax.tree_util.tree_map(jnp.asarray, get_carry(state).params)
    tables = make_tables(config)
    cast = lambda batch: {key: array.astype(dtypes_of(config).full) for key, array in batch.items()}
    out = jax.jit(lambda params, batch: forward(params, cast(batch), tables, config))(params, {k: batch[k] for k in _BATCH_KEYS})
    return {name: np.asarray(out[name]) for name in HEADS}
