"""The programs that are timed against each other: one training step, four ways, from the same start and the same rows.

    pmap           the original's call: host arrays of float32 in, un-replicated metrics out
    shard_map      kgo_shard's: packed rows placed by the rule table, augmented on the devices
    jit            kgo_shard's model and objective over the whole batch, sharded by the compiler alone (no shard_map, no collective of ours)
    one device     kgo_shard's step on one device with the same global batch: on cores that devices share, what the others can reach at best

`jit` and `one device` take the seki weight from the whole batch (objective="global"); the others from each device's rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import legacy_pmap
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from legacy_pmap import step as legacy_step

from kgo_shard import augment, layout, loss, mesh, optim, step
from kgo_shard.batches import epoch_files, read_packed_batches
from kgo_shard.config import Config
from kgo_shard.model import make_tables
from kgo_shard.state import Learned, init_state


class Contender(NamedTuple):
    """One program, in the pieces that are timed. `place` may return before the transfer is done, `call` before the step is."""

    name: str
    devices: int
    batches: Sequence[dict[str, np.ndarray]]  # on the host, as its loader makes them
    start: Callable[[], Any]  # -> state on the devices
    place: Callable[[dict[str, np.ndarray]], Any]  # stack and transfer one batch
    call: Callable[[Any, Any], tuple[Any, Any]]  # (state, placed) -> (state, metrics on the devices)
    fetch: Callable[[Any], Any]  # metrics -> host
    lower: Callable[[], jax.stages.Lowered]


def legacy_config(config: Config) -> legacy_pmap.Config:
    """The old stack's options of the same run."""
    return legacy_pmap.Config(**{name: getattr(config, name) for name in legacy_pmap.Config.__dataclass_fields__ if hasattr(config, name)})


def make_pmap(config: Config, files: Sequence[Path], num_batches: int, unreplicate: bool = False) -> Contender:
    """The original. `unreplicate` reads its metrics by `[0]`, as the original's loop does; else from the first device's shard."""
    old = legacy_config(config)
    run = legacy_step._compile(legacy_step.train_steps, old, (0, 0, 0, None, None, None))
    schedule = legacy_step._schedule(old, 0, 1)
    stream = legacy_pmap.read_batches(epoch_files(files, old.seed), old, old.seed)

    def call(carry, placed):
        carry, metrics, norm = run(tuple(carry[:3]), tuple(carry[3:]), placed, *schedule)
        return carry, (metrics, norm)

    def fetch(outputs):
        if unreplicate and old.data_parallel:
            return [np.asarray(x[0]) for x in outputs]
        return [legacy_step.first_replica(x, old) for x in outputs]

    batches = [next(stream) for _ in range(num_batches)]
    place = lambda batch: legacy_step._stack_batches([batch], old)  # noqa: E731  (pmap itself puts it on the devices)
    start = lambda: legacy_pmap.init_state(old).carry  # noqa: E731
    carry = start()
    lower = lambda: run.lower(tuple(carry[:3]), tuple(carry[3:]), place(batches[0]), *schedule)  # noqa: E731
    return Contender("pmap, [0]" if unreplicate else "pmap", old.num_devices, batches, start, place, call, fetch, lower)


def make_shard_map(config: Config, files: Sequence[Path], num_batches: int, name: str = "shard_map") -> Contender:
    device_mesh = mesh.make_mesh(config)
    return make_ours(name, config, files, num_batches, step.compile_steps(config, device_mesh), device_mesh)


def make_one_device(config: Config, files: Sequence[Path], num_batches: int) -> Contender:
    alone = config.replace(data_parallel=False, data_parallel_devices=0)
    return make_shard_map(alone, files, num_batches, "one device")


def make_automatic(config: Config, files: Sequence[Path], num_batches: int) -> Contender:
    device_mesh = mesh.make_mesh(config)
    return make_ours("jit", config, files, num_batches, compile_automatic(config, device_mesh), device_mesh)


def make_ours(name: str, config: Config, files: Sequence[Path], num_batches: int, run: Callable, device_mesh) -> Contender:
    schedule = optim.make_schedule(config, 0, 1)
    stream = read_packed_batches(epoch_files(files, config.seed), config, config.seed)
    batches = [next(stream) for _ in range(num_batches)]
    start = lambda: init_state(config).learned  # noqa: E731
    # The schedule goes up with every batch, as in training: pmap's call takes its own from the host, too.
    place = lambda batch: (mesh.put_batches(device_mesh, [batch]), mesh.put(device_mesh, schedule, "schedule"))  # noqa: E731
    call = lambda learned, placed: run(learned, *placed)  # noqa: E731
    learned = start()
    lower = lambda: run.lower(learned, *place(batches[0]))  # noqa: E731
    return Contender(name, device_mesh.size, batches, start, place, call, jax.device_get, lower)


def compile_automatic(config: Config, device_mesh) -> Callable:
    """train(learned, rows, schedule), as `step.compile_steps` makes it, without shard_map: where the rows are split decides all."""
    tables = make_tables(config.model)

    def train_on_batch(learned: Learned, rows, schedule):
        batch = augment.expand(rows, config.pos_len)
        statistics = loss.update_statistics(learned.statistics, loss.unowned_share(batch))
        weight = loss.seki_weight(statistics)

        def objective(net):
            outputs = net(batch[layout.PLANES], batch[layout.GLOBALS], tables)
            terms = loss.compute_terms(outputs, batch, weight, tables, config.loss_profile)
            return terms.loss, terms

        gradients, terms = jax.grad(objective, has_aux=True)(learned.net)
        norm = optim.global_norm(gradients) if config.needs_grad_norm else jnp.float32(0)
        clipped = optim.clip(gradients, norm, config.grad_clip_norm) if config.grad_clip_norm > 0 else gradients
        return step.update(learned, clipped, statistics, schedule, config), gradients, jnp.stack(terms), norm

    def train(learned, rows, schedule):
        def one(carry, inputs):
            after, gradients, terms, norm = train_on_batch(carry[0], *inputs)
            return step.keep_finite(carry, (after, step.add(carry[1], terms, norm, gradients, config)), config), None

        return jax.lax.scan(one, (learned, step.no_steps()), (rows, schedule))[0]

    everywhere = NamedSharding(device_mesh, PartitionSpec())
    by_rows = NamedSharding(device_mesh, PartitionSpec(None, mesh.AXIS))
    return jax.jit(train, in_shardings=(everywhere, by_rows, everywhere), out_shardings=everywhere)


