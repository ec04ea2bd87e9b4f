"""One optimizer step, read top to bottom, and the compiled functions made from it.

`train_on_batch` is the whole step as each device runs it, inside `shard_map` over the mesh with `check_vma=True`: the
type system proves that everything which leaves it as replicated is replicated.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from . import augment, convert, layout, loss, mesh, optim, reduce, shares
from .config import Config
from .loss import MovingStatistics, Terms
from .mesh import make_mesh
from .model import Net, Tables, make_tables
from .optim import Schedule
from .state import Learned, TrainState

Batch = dict[str, np.ndarray]


class Stages(NamedTuple):
    """What one step computes on its way, in order. `_local` values are each device's own."""

    batch_local: dict[str, Array]
    terms_local: Terms
    gradients_local: Net
    gradients: Net
    norm: Float[Array, ""]
    clipped: Net
    terms: Terms


def train_on_batch(learned: Learned, rows: dict[str, Array], schedule: Schedule, config: Config, tables: Tables) -> tuple[Learned, Stages]:
    """One step on one device's rows: objective, gradient, reduction, clip, optimizer, moving averages."""
    statistics, stages = differentiate(learned, rows, config, tables)
    return update(learned, stages.clipped, statistics, schedule, config), stages


def differentiate(learned: Learned, rows: dict[str, Array], config: Config, tables: Tables) -> tuple[MovingStatistics, Stages]:
    """The first half of a step: everything that depends on the rows."""
    batch_local = augment.expand(rows, config.pos_len)
    seki_weight, statistics_local = weigh_seki(learned.statistics, batch_local, config)
    gradients_local, terms_local = local_gradient(learned.net, batch_local, seki_weight, tables, config)
    gradients = reduce.mean_shares(gradients_local) if config.splits_state else reduce.mean_gradients(gradients_local)
    terms = reduce.sum_terms(terms_local)
    statistics = reduce.mean_statistics(statistics_local)
    norm = optim.global_norm(gradients) if config.needs_grad_norm else jnp.float32(0)
    clipped = optim.clip(gradients, norm, config.grad_clip_norm) if config.grad_clip_norm > 0 else gradients
    return statistics, Stages(batch_local, terms_local, gradients_local, gradients, norm, clipped, terms)


def weigh_seki(statistics: MovingStatistics, batch_local: dict[str, Array], config: Config):
    """The seki weight, and the statistics moved by these rows.

    objective="replica": from the device's own rows, as the original does, although the statistics are averaged over
    the devices afterwards. "global": from the whole batch, so that D devices have the single device's gradient.
    """
    unowned_local = loss.unowned_share(batch_local)
    if config.objective == "global":
        unowned_local = reduce.to_local(reduce.mean_unowned(unowned_local))
    statistics_local = loss.update_statistics(reduce.to_local(statistics), unowned_local)
    return loss.seki_weight(statistics_local), statistics_local


def local_gradient(net: Net, batch_local: dict[str, Array], seki_weight, tables: Tables, config: Config) -> tuple[Net, Terms]:
    """The gradient of the device's own loss, in the parameter dtype: nothing is reduced before or inside it."""

    def objective(net_local):
        outputs = net_local(batch_local[layout.PLANES], batch_local[layout.GLOBALS], tables)
        terms_local = loss.compute_terms(outputs, batch_local, seki_weight, tables, config.loss_profile)
        return terms_local.loss, terms_local

    gradients_local, terms_local = jax.grad(objective, has_aux=True)(reduce.whole_net(net, config))
    return jax.tree.map(lambda g: g.astype(config.precision.param), gradients_local), terms_local


def update(learned: Learned, gradients: Net, statistics: MovingStatistics, schedule: Schedule, config: Config) -> Learned:
    """Optimizer, then the moving average of the new parameters."""
    optimizer = optim.make_optimizer(config)
    direction, opt_state = optimizer.update(gradients, learned.opt_state, learned.net, count=schedule.count)
    net = optim.apply_direction(learned.net, direction, schedule, config)
    ema = None if learned.ema is None else optim.update_ema(learned.ema, net, config.ema_decay)
    return Learned(net, opt_state, ema, statistics)


class Totals(NamedTuple):
    """What the steps of one call add up to."""

    terms: Float[Array, " terms"]
    norm: Float[Array, ""]
    steps: Int[Array, ""]  # that were finite, before the first that was not
    finite: Bool[Array, ""]  # whether all were


def no_steps() -> Totals:
    return Totals(jnp.zeros(len(Terms._fields), jnp.float32), jnp.float32(0), jnp.int32(0), jnp.bool_(True))


def train_on_batches(learned: Learned, rows: dict[str, Array], schedule: Schedule, config: Config, tables: Tables) -> tuple[Learned, Totals]:
    """K steps, scanned over the leading axis of rows and schedule; from the first step that is not finite on nothing changes any more."""

    def one(carry, inputs):
        learned, stages = train_on_batch(carry[0], *inputs, config, tables)
        totals = add(carry[1], jnp.stack(stages.terms), stages.norm, stages.gradients, config)
        return keep_finite(carry, (learned, totals), config), None

    return jax.lax.scan(one, (learned, no_steps()), (rows, schedule))[0]


def add(totals: Totals, terms: Array, norm: Array, gradients: Net, config: Config) -> Totals:
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in (terms, norm, *jax.tree.leaves(gradients))]).all()
    finite = reduce.on_every_device(finite) if config.splits_state else finite
    return Totals(totals.terms + terms, totals.norm + norm, totals.steps + 1, totals.finite & finite)


def keep_finite(before: tuple[Learned, Totals], after: tuple[Learned, Totals], config: Config) -> tuple[Learned, Totals]:
    """(state, totals) `after` a step, or those `before` it where one of its terms, its norm or its gradient is not finite.

    On the device, because the state before may have been donated, and in a call of K steps nobody else could go back.
    """
    if config.on_nonfinite == "ignore":
        return after
    finite = after[1].finite
    learned, totals = jax.tree.map(lambda old, new: jax.lax.select(finite, new, old), before, after)
    return learned, totals._replace(finite=finite)


def evaluate_batch(net: Net, rows: dict[str, Array], config: Config, tables: Tables) -> Terms:
    """The terms of one batch with the constant seki weight of evaluation; statistics stay as they are."""
    batch_local = augment.expand(rows, config.pos_len)
    outputs = reduce.whole_net(net, config)(batch_local[layout.PLANES], batch_local[layout.GLOBALS], tables)
    weight = jnp.float32(loss.EVALUATION_SEKI_WEIGHT)
    return reduce.sum_terms(loss.compute_terms(outputs, batch_local, weight, tables, config.loss_profile))


def compile_steps(config: Config, device_mesh) -> Callable:
    """train(learned, rows, schedule) -> (learned, Totals): K steps in one compiled call."""
    tables = make_tables(config.model)

    def body(learned, rows, schedule):
        return train_on_batches(learned, rows, schedule, config, tables)

    kind = mesh.state_kind(config)
    sharded = mesh.shard(body, device_mesh, inputs=(kind, "batch", "schedule"), outputs=(kind, "result"))
    return jax.jit(sharded, donate_argnums=(0,) if config.donate_train_buffers else ())


def compile_apart(config: Config, device_mesh) -> Callable:
    """The same with --muon-split-jit: the gradient and the update are compiled calls of their own, twice K of them."""
    tables = make_tables(config.model)

    def first_half(learned, rows):
        def one(_, rows):  # a scan of one, as in the whole step
            statistics, stages = differentiate(learned, rows, config, tables)
            return None, (stages.clipped, statistics, jnp.stack(stages.terms), stages.norm)

        return jax.tree.map(lambda x: x[0], jax.lax.scan(one, None, rows)[1])

    def second_half(learned, totals, gradients, statistics, terms, norm, schedule):
        after = update(learned, gradients, statistics, schedule, config), add(totals, terms, norm, gradients, config)
        return keep_finite((learned, totals), after, config)

    differentiated = jax.jit(mesh.shard(first_half, device_mesh, inputs=("state", "batch"), outputs=("result",) * 4))
    inputs = ("state", *("result",) * 5, "schedule")
    sharded = mesh.shard(second_half, device_mesh, inputs=inputs, outputs=("state", "result"))
    updated = jax.jit(sharded, donate_argnums=(0,) if config.donate_train_buffers else ())

    def train(learned, rows, schedule):
        totals = mesh.put(device_mesh, no_steps(), "result")
        for k in range(len(schedule.count)):
            found = differentiated(learned, {key: x[k : k + 1] for key, x in rows.items()})
            learned, totals = updated(learned, totals, *found, jax.tree.map(lambda x: x[k], schedule))
        return learned, totals

    return train


class NonfiniteError(ArithmeticError):
    """A step whose loss, norm or gradient is not finite. `state` and `metrics` are those of the steps before it, `index` is its batch."""

    def __init__(self, state: TrainState, metrics: dict[str, float], index: int):
        super().__init__(
            f"step {state.step + 1}: its loss or its gradient is not finite: lower lr, look at its rows, or choose another on_nonfinite (skip, ignore)"
        )
        self.state, self.metrics, self.index = state, metrics, index


def make_train_step(config: Config) -> Callable[[TrainState, Sequence[Batch]], tuple[TrainState, dict[str, float]]]:
    """step(state, [batch, ...]) -> (state, metrics): K batches, K updates, one compiled call (two an update with --muon-split-jit).

    Metrics are summed over the K steps, with `grad_norm`; `lr` is the last step's. Each K compiles once.
    `submitted(outputs)`, where given, is called once the work is on its way, before the wait for the metrics.
    A step whose loss or gradient is not finite raises NonfiniteError, which has the state before it; with on_nonfinite="skip" its
    update is dropped instead, neither `step` nor `samples` count it, and `skipped` in the metrics does.
    """
    device_mesh = make_mesh(config)
    compiled = (compile_apart if config.update_apart else compile_steps)(config, device_mesh)

    def step(state, batches, submitted=None):
        check_batches(batches, config)
        schedule = optim.make_schedule(config, state.step, len(batches))
        rows = mesh.put_batches(device_mesh, batches)
        outputs = learned, totals = compiled(state.learned, rows, mesh.put(device_mesh, schedule, "schedule"))
        if submitted is not None:
            submitted(outputs)
        metrics = to_metrics(totals.terms) | {"grad_norm": float(totals.norm), "lr": float(schedule.learning_rate[-1])}
        done = int(totals.steps)
        state = TrainState(learned, state.step + done, state.samples + done * config.batch_size)
        if done < len(batches):
            raise NonfiniteError(state, metrics, done)
        return state, metrics

    def skipping_step(state, batches, submitted=None):
        try:
            state, metrics = step(state, batches, submitted)
            return state, metrics | {"skipped": 0}
        except NonfiniteError as error:
            state, metrics, rest = error.state, error.metrics | {"skipped": 1}, batches[error.index + 1 :]
        if rest:
            state, more = skipping_step(state, rest, submitted)
            metrics = {name: metrics[name] + value for name, value in more.items()} | {"lr": more["lr"]}
        return state, metrics

    return skipping_step if config.on_nonfinite == "skip" else step


def make_eval_step(config: Config) -> Callable[[TrainState, Batch], dict[str, float]]:
    """evaluate(state, batch) -> metrics, with the live parameters (not the moving average)."""
    tables = make_tables(config.model)

    def body(net, rows):
        return jnp.stack(evaluate_batch(net, first_batch(rows), config, tables))

    device_mesh = make_mesh(config)
    compiled = jax.jit(mesh.shard(body, device_mesh, inputs=(mesh.state_kind(config), "batch"), outputs="result"))

    def evaluate(state, batch):
        check_batches([batch], config)
        return to_metrics(compiled(state.learned.net, mesh.put_batches(device_mesh, [batch])))

    return evaluate


def make_gradient(config: Config) -> Callable[[TrainState, Batch], tuple[dict[str, np.ndarray], dict[str, float]]]:
    """gradient(state, batch) -> (reduced gradients before clipping under their original names, metrics)."""
    tables = make_tables(config.model)

    def body(learned, rows):
        _, stages = differentiate(learned, first_batch(rows), config, tables)
        return stages.gradients, jnp.stack(stages.terms)

    device_mesh, kind = make_mesh(config), mesh.state_kind(config)
    compiled = jax.jit(mesh.shard(body, device_mesh, inputs=(kind, "batch"), outputs=(gradient_kind(config), "result")))

    def gradient(state, batch):
        check_batches([batch], config)
        gradients, terms = compiled(state.learned, mesh.put_batches(device_mesh, [batch]))
        return convert.to_named(shares.join_net(jax.device_get(gradients))), to_metrics(terms)

    return gradient


def make_probe(config: Config) -> Callable[[TrainState, Batch], tuple[TrainState, Stages]]:
    """probe(state, batch) -> (state, stages): one step that also returns everything it computed on its way.

    `_local` leaves have a leading axis of devices. The body is the train step's own.
    """
    tables = make_tables(config.model)

    def body(learned, rows, schedule):
        # A scan of one step, as in the train step: outside a loop the compiler may arrange a convolution otherwise.
        def one(learned, inputs):
            return train_on_batch(learned, *inputs, config, tables)

        learned, stages = jax.lax.scan(one, learned, (rows, schedule))
        local, reduced = stages[:3], stages[3:]  # the scan's axis of one stands where the devices' axis goes
        return learned, local, *jax.tree.map(lambda x: x[0], reduced)

    device_mesh, kind, gradients = make_mesh(config), mesh.state_kind(config), gradient_kind(config)
    outputs = (kind, "local", gradients, "result", gradients, "result")
    compiled = jax.jit(mesh.shard(body, device_mesh, inputs=(kind, "batch", "schedule"), outputs=outputs))

    def probe(state, batch):
        check_batches([batch], config)
        schedule = mesh.put(device_mesh, optim.make_schedule(config, state.step, 1), "schedule")
        learned, local, gradients, norm, clipped, terms = compiled(state.learned, mesh.put_batches(device_mesh, [batch]), schedule)
        local, gradients, norm, clipped, terms = jax.device_get((local, gradients, norm, clipped, terms))
        stages = Stages(*local, shares.join_net(gradients), norm, shares.join_net(clipped), terms)
        return TrainState(learned, state.step + 1, state.samples + config.batch_size), stages

    return probe


def head_outputs(state: TrainState, batch: Batch, config: Config) -> dict[str, np.ndarray]:
    """The head outputs of one batch, (B, ...) float32, under the original's names."""
    tables = make_tables(config.model)

    def body(net, rows):
        rows = augment.expand(first_batch(rows), config.pos_len)
        return reduce.whole_net(net, config)(rows[layout.PLANES], rows[layout.GLOBALS], tables)

    device_mesh = make_mesh(config)
    compiled = jax.jit(mesh.shard(body, device_mesh, inputs=(mesh.state_kind(config), "batch"), outputs="local"))
    outputs = jax.device_get(compiled(state.learned.net, mesh.put_batches(device_mesh, [batch])))
    legacy = {"more_misc": "moremisc", "future": "futurepos", "score_belief": "scorebelief"}
    return {legacy.get(name, name): value for name, value in outputs._asdict().items()}


def gradient_kind(config: Config) -> str:
    """The kind of placement of reduced gradients: the same on all devices, or each device's own shares."""
    return "local" if config.splits_state else "result"


def first_batch(rows: dict[str, Array]) -> dict[str, Array]:
    """The only batch of a stack of one."""
    return {key: value[0] for key, value in rows.items()}


def to_metrics(terms: Float[Array, " terms"]) -> dict[str, float]:
    """The vector of terms by name; the only wait for the device in a step."""
    return dict(zip(Terms._fields, np.asarray(terms).tolist(), strict=True))


def check_batches(batches: Sequence[Batch], config: Config):
    """Refuse a batch that is not B whole rows of the run's board: ValueError naming the array."""
    if not batches:
        raise ValueError("no batches: a step takes at least one")
    shapes = layout.row_shapes(config.pos_len)
    for index, batch in enumerate(batches):
        planes = layout.PACKED if layout.PACKED in batch else layout.PLANES
        for key in (planes, layout.GLOBALS, layout.POLICY, layout.TARGETS, layout.SCORES, layout.VALUES):
            if key not in batch:
                raise ValueError(f"batch {index}: {key} is missing")
        for key, value in batch.items():
            expected = (config.batch_size, *shapes.get(key, value.shape[1:]))
            narrower = key == layout.TARGETS and value.shape[:1] == expected[:1] and value.shape[1] >= expected[1]
            if value.shape != expected and not narrower:
                raise ValueError(f"batch {index}: {key} has shape {value.shape}, expected {expected} (batch_size, pos_len)")
