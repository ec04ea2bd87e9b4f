"""Faults that people make when they move a step from pmap to shard_map, planted one at a time in the new side.

Each is a context manager that replaces one function of `kgo_shard` while it is active, so the code under test carries
no switches. The harness must name each at the stage where it was planted, and never later.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import augment, batches, checkpoint, convert, layout, loss, mesh, muon, optim, reduce, shares, step
from .. import state as state_module
from ..config import ConfigError
from ..model import RMSNorm
from . import shard_side


class Fault(NamedTuple):
    """One planted fault, where the harness has to find it, and what a run must have for it to show."""

    plant: Callable[[], object]  # -> context manager
    stage: str
    meaning: str
    step: int = 1  # 0: already in the start state
    options: dict[str, Any] = {}  # of the run, beside the usual ones
    fresh: bool = False  # from the seed; else from a checkpoint in the middle of a run
    whole: bool = False  # only where every device has the whole state: parameters gathered from shares vary over the devices by themselves


@contextmanager
def replaced(module, name: str, faulty) -> Iterator[None]:
    """`module.name` is `faulty(original)` for a while. Compiled functions are made anew, so none outlives the fault."""
    with mock.patch.object(module, name, faulty(getattr(module, name))):
        yield


@contextmanager
def reduction(faulty) -> Iterator[None]:
    """`faulty(original)` in place of the gradients' mean; where the state is split, each device's shares of what that gives."""
    change = faulty(reduce.mean_gradients)

    def own_shares(gradients):
        cut = shares.cut_net(change(gradients), jax.lax.axis_size(mesh.AXIS))
        return jax.tree.map(lambda g: jax.lax.dynamic_index_in_dim(g, jax.lax.axis_index(mesh.AXIS)), cut)

    with mock.patch.object(reduce, "mean_gradients", change), mock.patch.object(reduce, "mean_shares", own_shares):
        yield


def first_device(tree):
    """Device 0's value on every device: what `check_vma=False` silently returns for a sum that somebody forgot."""
    return sum_over(tree, jax.lax.axis_index(mesh.AXIS) == 0)


def sum_over(tree, counts):
    """The sum over the devices on which `counts` is true."""
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(counts, x, jnp.zeros_like(x)), mesh.AXIS), tree)


def naive_port():
    """pmean(grad(loss)) over replicated parameters: autodiff has already summed, the mean changes nothing."""
    return replaced(step, "local_gradient", lambda original: _without_cast(original))


def _without_cast(original):
    def faulty(*arguments):
        with mock.patch.object(reduce, "to_local", lambda tree: tree):
            return original(*arguments)

    return faulty


def gradients_summed():
    return reduction(lambda _: lambda g: jax.lax.psum(g, mesh.AXIS))


def leaf_not_reduced():
    def faulty(original):
        def reduced(gradients):
            bad = first_device(gradients.blocks[1].ffn.down.weight)
            return _with(original(gradients), ".blocks[1].ffn.down.weight", bad)

        return reduced

    return reduction(faulty)


def gradients_in_bfloat16():
    def faulty(original):
        def reduced(gradients):
            low = original(jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients))
            return jax.tree.map(lambda x, g: x.astype(g.dtype), low, gradients)

        return reduced

    return reduction(faulty)


def statistics_not_averaged():
    return replaced(reduce, "mean_statistics", lambda _: first_device)


def statistics_reduced_before_use():
    """The batch's seki weight instead of each device's own: a better objective, and another one."""
    return replaced(loss, "unowned_share", lambda original: lambda batch: reduce.to_local(reduce.mean_unowned(original(batch))))


def ema_before_update():
    def faulty(original):
        def update(learned, gradients, statistics, schedule, config):
            new = original(learned, gradients, statistics, schedule, config)
            ema = optim.update_ema(learned.ema, learned.net, config.ema_decay)
            return type(new)(new.net, new.opt_state, ema, new.statistics)

        return update

    return replaced(step, "update", faulty)


def schedule_off_by_one():
    return replaced(optim, "learning_rate", lambda original: lambda config, s: original(config, s + 1))


def count_off_by_one():
    """Bias correction with t = 2 in the first step."""

    def faulty(original):
        def make(config, s, n):
            schedule = original(config, s, n)
            return schedule._replace(count=schedule.count + 1)

        return make

    return replaced(optim, "make_schedule", faulty)


def decay_on_norms():
    def faulty(original):
        def labels(net):
            is_norm = lambda part: isinstance(part, RMSNorm)  # noqa: E731
            return jax.tree.map(lambda part: RMSNorm(True) if is_norm(part) else part, original(net), is_leaf=is_norm)

        return labels

    return replaced(optim, "decay_labels", faulty)


def no_decay_on_a_head():
    return replaced(optim, "decay_labels", lambda original: lambda net: _with(original(net), ".policy_head.board.weight", False))


def leaves_swapped():
    """Keys loaded into queries and the reverse: same shapes, so nothing complains."""

    def faulty(original):
        def loaded(net, named):
            q, k = "blocks/0/q_proj/w", "blocks/0/k_proj/w"
            return original(net, dict(named) | {q: named[k], k: named[q]})

        return loaded

    return replaced(convert, "from_named", faulty)


def leaf_transposed():
    def faulty(original):
        def loaded(net, named):
            return original(net, dict(named) | {"blocks/1/out_proj/w": named["blocks/1/out_proj/w"].T})

        return loaded

    return replaced(convert, "from_named", faulty)


def rows_dealt_round_robin():
    """Row i to device i mod D, as a reshape with the axes the wrong way round does."""

    def faulty(original):
        def put(device_mesh, rows):
            size = device_mesh.size
            return original(device_mesh, [{k: np.concatenate([v[i::size] for i in range(size)]) for k, v in batch.items()} for batch in rows])

        return put

    return replaced(mesh, "put_batches", faulty)


def symmetry_on_inputs_only():
    def faulty(original):
        def turned(arrays, symmetry, pos_len):
            return {layout.PLANES: original(arrays, symmetry, pos_len)[layout.PLANES]}

        return turned

    return replaced(augment, "turn", faulty)


def history_drawn_twice():
    """One more draw from the stream: every later symmetry and history is another."""

    def faulty(original):
        def draw(rand, num_rows):
            rand.random()
            return original(rand, num_rows)

        return draw

    return replaced(batches, "draw_history", faulty)


def target_column_off_by_one():
    return mock.patch.object(layout.Column, "score_mean", layout.Column.score_mean - 1)


def metrics_averaged():
    return replaced(reduce, "sum_terms", lambda _: lambda terms: loss.Terms(*jax.lax.pmean(jnp.stack(terms), mesh.AXIS)))


def local_weight_normalisation():
    """Each device divides by its own weights instead of its rows."""

    def faulty(original):
        def terms(outputs, batch, *arguments):
            found = original(outputs, batch, *arguments)
            return found._replace(loss=found.loss * len(batch[layout.TARGETS]) / (found.wsum + 0.5))

        return terms

    return replaced(loss, "compute_terms", faulty)


def stop_gradient_dropped():
    """In one term: the predicted error is pulled towards a real one that moves with it."""

    def faulty(original):
        def term(*arguments):
            with mock.patch.object(loss, "sg", lambda x: x):
                return original(*arguments)

        return term

    return replaced(loss, "value_error_loss", faulty)


def clip_before_reduction():
    """Every device clips its own gradient by its own norm."""

    def faulty(original):
        def reduced(gradients):
            norm = optim.global_norm(gradients)
            return original(optim.clip(gradients, norm, 1.0))

        return reduced

    return reduction(faulty)


def beta_in_double():
    """1 - beta taken in double precision and rounded: 0.1, where the original has 0.10000002."""

    def change(update, gradients, state, extra):
        direction, new = update(gradients, state, **extra)
        return direction, new._replace(m=jax.tree.map(lambda g, m: jnp.float32(0.9) * m + jnp.float32(0.1) * g, gradients, state.m))

    return _faulty_transform("scale_by_adam", change)


def gradients_reduced_twice():
    return reduction(lambda original: lambda g: jax.lax.psum(reduce.to_local(original(g)), mesh.AXIS))


def gradients_not_reduced():
    return reduction(lambda _: first_device)


def half_the_mesh():
    """The mean over the first half of the devices only."""

    def faulty(_):
        def reduced(gradients):
            half = jax.lax.axis_size(mesh.AXIS) // 2
            return jax.tree.map(lambda g: g / half, sum_over(gradients, jax.lax.axis_index(mesh.AXIS) < half))

        return reduced

    return reduction(faulty)


def automatic_sum_in_bfloat16():
    """No cast to varying, and the factor D mended afterwards: what autodiff summed by itself were bfloat16 cotangents."""

    def faulty(original):
        def gradient(*arguments):
            gradients, terms = _without_cast(original)(*arguments)
            return jax.tree.map(lambda g: g / jax.lax.axis_size(mesh.AXIS), gradients), terms

        return gradient

    return replaced(step, "local_gradient", faulty)


def metrics_not_summed():
    return replaced(reduce, "sum_terms", lambda _: lambda terms: loss.Terms(*first_device(jnp.stack(terms))))


def ema_in_bfloat16():
    def faulty(original):
        def update(ema, params, decay):
            low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), ema)
            return jax.tree.map(lambda e, old: e.astype(old.dtype), original(low, params, decay), ema)

        return update

    return replaced(optim, "update_ema", faulty)


def clip_without_epsilon():
    return mock.patch.object(optim, "CLIP_EPSILON", 0.0)


def _faulty_transform(name: str, change):
    """The transform `optim.name` with another `update`: change(good update, gradients, state, extra)."""

    def faulty(original):
        def transform(*arguments):
            good = original(*arguments)

            def update(gradients, state, params=None, **extra):
                return change(good.update, gradients, state, extra)

            return type(good)(good.init, update)

        return transform

    return replaced(optim, name, faulty)


def moments_in_bfloat16():
    def change(update, gradients, state, extra):
        direction, new = update(gradients, state, **extra)
        return direction, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), new)

    return _faulty_transform("scale_by_adam", change)


def stock_optax_adam():
    """optax.scale_by_adam with the same betas and epsilon: it takes 1 - beta in double precision."""

    def change(update, gradients, state, extra):
        stock = optax.scale_by_adam(optim.ADAM_BETA1, optim.ADAM_BETA2, optim.ADAM_EPSILON)
        before = optax.ScaleByAdamState((extra["count"] - 1).astype(jnp.int32), state.m, state.v)
        direction, after = stock.update(gradients, before)
        return direction, type(state)(after.mu, after.nu)

    return _faulty_transform("scale_by_adam", change)


def muon_momentum_averaged():
    """m = 0.95 m + 0.05 g, as Optax has it: the direction is nearly the same, for the iteration forgets the scale."""

    def change(update, gradients, state, extra):
        return update(jax.tree.map(lambda g: 0.05 * g, gradients), state, **extra)

    return _faulty_transform("scale_by_muon", change)


def _uncut(left_whole: str):
    """The matrices with this label as whole ones."""
    return replaced(muon, "split", lambda original: lambda m, cut, config: m if cut == left_whole else original(m, cut, config))


def muon_without_heads():
    return _uncut(muon.BY_HEADS)


def muon_without_row_split():
    return _uncut(muon.BY_ROWS)


def muon_scaled_otherwise():
    """sqrt(max(1, rows / columns)), the scale of the first Muon, in place of sqrt(max(rows, columns))."""

    def faulty(original):
        def directions(blocks, cut, config):
            def rescaled(direction, m):
                rows, columns = jax.eval_shape(lambda m: muon.split(m, cut, config), m).shape[-2:]
                return direction * (max(1, rows / columns) / max(rows, columns)) ** 0.5

            whole = muon.whole_matrices(blocks, config) if config.splits_state else blocks
            return jax.tree.map(rescaled, original(blocks, cut, config), whole)

        return directions

    return replaced(muon, "directions", faulty)


def muon_one_step_less():
    return replaced(muon, "orthogonalize", lambda original: lambda x, steps: original(x, steps - 1))


def decay_by_rank():
    """Whatever has two axes decays: with stacked blocks the norms have two."""
    return replaced(optim, "decay_labels", lambda _: lambda net: jax.tree.map(lambda p: p.ndim > 1, net))


def schedule_from_local_batch():
    """Warm-up and length counted in each device's rows."""

    def faulty(original):
        return lambda config, s: original(config.replace(batch_size=config.batch_size // config.data_parallel_devices, data_parallel=False, data_parallel_devices=0), s)

    return replaced(optim, "learning_rate", faulty)


def short_batch_included():
    """The rest of a file as a batch of its own, filled up with the file's first rows."""

    def faulty(original):
        def load(*arguments):
            rows = original(*arguments)
            count = len(rows[layout.TARGETS])
            return {key: np.concatenate([value, value[: -count % SHORT_BATCH]]) for key, value in rows.items()}

        return load

    return replaced(batches, "load_rows", faulty)


def evaluation_with_training_weight():
    """The seki weight with which training starts on full boards, in place of evaluation's constant."""
    return mock.patch.object(loss, "EVALUATION_SEKI_WEIGHT", loss.SEKI_SCALE / loss.SEKI_FLOOR)


def evaluation_of_ema():
    """The moving average evaluated, where the original evaluates the live parameters."""

    def faulty(original):
        def make(config):
            evaluate = original(config)

            return lambda state, batch: evaluate(_with_learned(state, net=state.learned.ema), batch)

        return make

    return replaced(step, "make_eval_step", faulty)


def _not_restored(change):
    """The state as loaded, changed by `change(state)`."""
    return replaced(checkpoint, "load_checkpoint", lambda original: lambda path, config: change(original(path, config)))


def _with_learned(state, **changes):
    return dataclasses.replace(state, learned=dataclasses.replace(state.learned, **changes))


def counts_not_restored():
    return _not_restored(lambda state: dataclasses.replace(state, step=0, samples=0))


def samples_from_steps():
    """Only the step restored, the samples counted from one device's rows."""
    return _not_restored(lambda state: dataclasses.replace(state, samples=state.samples // 8))


def ema_not_restored():
    return _not_restored(lambda state: _with_learned(state, ema=jax.tree.map(jnp.copy, state.learned.net)))


def moments_not_restored():
    return _not_restored(lambda state: _with_learned(state, opt_state=jax.tree.map(jnp.zeros_like, state.learned.opt_state)))


def statistics_not_restored():
    return _not_restored(lambda state: _with_learned(state, statistics=jax.tree.map(jnp.zeros_like, state.learned.statistics)))


def epoch_seed_without_step():
    """A resumed run that draws the first epoch again: the original adds the step to the seed."""

    def faulty(original):
        def chunks(files, config, current):
            resumed_at = current().step
            return original(files, config, lambda: dataclasses.replace(current(), step=current().step - resumed_at))

        return chunks

    return replaced(shard_side, "training_chunks", faulty)


def other_initial_numbers():
    """Equinox's habit of one key a module: other numbers from the same seed."""
    return replaced(state_module, "init_net", lambda original: lambda key, *rest: original(jax.random.split(key)[1], *rest))


def _with(tree, path: str, value):
    """`tree` with the leaf at `path` replaced."""
    return jax.tree_util.tree_map_with_path(lambda p, leaf: value if jax.tree_util.keystr(p) == path else leaf, tree)


SHORT_BATCH = 88  # rows of a batch that leaves a rest of the shipped files
MUON = {"optimizer": "muon", "muon_row_split_size": 16}

FAULTS = {
    # Start
    "other_initial_numbers": Fault(other_initial_numbers, "parameters", "the seed's numbers drawn in another order", step=0, fresh=True),
    "leaves_swapped": Fault(leaves_swapped, "moments", "two leaves swapped in conversion, in every tree", step=0),
    "leaf_transposed": Fault(leaf_transposed, "moments", "one leaf transposed in conversion, in every tree", step=0),
    "moments_not_restored": Fault(moments_not_restored, "moments", "moments not restored", step=0),
    "ema_not_restored": Fault(ema_not_restored, "ema", "moving average restarted from the parameters", step=0),
    "statistics_not_restored": Fault(statistics_not_restored, "moving_statistics", "moving statistics not restored", step=0),
    "counts_not_restored": Fault(counts_not_restored, "counts", "step and sample counts not restored", step=0),
    "samples_from_steps": Fault(samples_from_steps, "counts", "samples counted by one device's rows", step=0),
    # Batch
    "epoch_seed_without_step": Fault(epoch_seed_without_step, "batch", "epoch of a resumed run seeded without the step"),
    "rows_dealt_round_robin": Fault(rows_dealt_round_robin, "batch", "rows dealt to other devices"),
    "symmetry_on_inputs_only": Fault(symmetry_on_inputs_only, "batch", "symmetry on the inputs only"),
    "history_drawn_twice": Fault(history_drawn_twice, "batch", "random draws in another order"),
    "short_batch_included": Fault(short_batch_included, "batch", "a file's short rest included", step=3, options={"batch_size": SHORT_BATCH}),
    # Objective
    "target_column_off_by_one": Fault(target_column_off_by_one, "loss_terms", "a target column off by one"),
    "statistics_reduced_before_use": Fault(statistics_reduced_before_use, "loss_terms", "statistics averaged before use"),
    "local_weight_normalisation": Fault(local_weight_normalisation, "loss_terms", "loss divided by the local weights"),
    "stop_gradient_dropped": Fault(stop_gradient_dropped, "raw_gradient", "stop_gradient dropped in one term"),
    # Gradient and its reduction
    "naive_port": Fault(naive_port, "raw_gradient", "gradients D times too large: not cast to varying before grad", whole=True),
    "automatic_sum_in_bfloat16": Fault(
        automatic_sum_in_bfloat16, "raw_gradient", "autodiff's own sum, in bfloat16", options={"compute_dtype": "bfloat16"}, whole=True
    ),
    "gradients_summed": Fault(gradients_summed, "reduced_gradient", "gradients summed instead of averaged"),
    "gradients_reduced_twice": Fault(gradients_reduced_twice, "reduced_gradient", "gradients averaged, then summed"),
    "gradients_not_reduced": Fault(gradients_not_reduced, "reduced_gradient", "gradients not reduced: the first device's everywhere"),
    "half_the_mesh": Fault(half_the_mesh, "reduced_gradient", "gradients of half the devices"),
    "leaf_not_reduced": Fault(leaf_not_reduced, "reduced_gradient", "one leaf not reduced"),
    "gradients_in_bfloat16": Fault(gradients_in_bfloat16, "reduced_gradient", "gradients reduced in bfloat16"),
    "clip_before_reduction": Fault(clip_before_reduction, "reduced_gradient", "clipped before the reduction"),
    "clip_without_epsilon": Fault(
        # Against a norm of 26, float32 does not show an epsilon of 1e-6.
        clip_without_epsilon, "clip", "clip without its epsilon", options={"loss_profile": "value_only", "grad_clip_norm": 0.1}
    ),
    # Optimizer
    "schedule_off_by_one": Fault(schedule_off_by_one, "learning_rate", "learning rate off by one step"),
    "schedule_from_local_batch": Fault(schedule_from_local_batch, "learning_rate", "schedule counted in local batches"),
    "beta_in_double": Fault(beta_in_double, "moments", "1 - beta in another precision"),
    "stock_optax_adam": Fault(stock_optax_adam, "moments", "optax.scale_by_adam with the same constants"),
    "moments_in_bfloat16": Fault(moments_in_bfloat16, "moments", "moments kept in bfloat16"),
    "muon_momentum_averaged": Fault(muon_momentum_averaged, "moments", "Muon's momentum averaged, as Optax has it", options=MUON),
    "muon_without_heads": Fault(muon_without_heads, "parameters", "Muon without the split by heads", options=MUON),
    "muon_without_row_split": Fault(muon_without_row_split, "parameters", "Muon without the split by rows", options=MUON),
    "muon_scaled_otherwise": Fault(muon_scaled_otherwise, "parameters", "Muon's update scaled as in its first version", options=MUON),
    "muon_one_step_less": Fault(muon_one_step_less, "parameters", "one step of Muon's iteration left out", options=MUON),
    "count_off_by_one": Fault(count_off_by_one, "parameters", "optimizer's step count off by one"),
    "decay_on_norms": Fault(decay_on_norms, "parameters", "weight decay on norms"),
    "decay_by_rank": Fault(decay_by_rank, "parameters", "weight decay on all that has two axes", options={"stack_blocks": True}),
    "no_decay_on_a_head": Fault(no_decay_on_a_head, "parameters", "no weight decay on a head"),
    # After the update
    "ema_before_update": Fault(ema_before_update, "ema", "moving average taken before the update"),
    "ema_in_bfloat16": Fault(ema_in_bfloat16, "ema", "moving average in bfloat16"),
    "statistics_not_averaged": Fault(statistics_not_averaged, "moving_statistics", "moving statistics not averaged"),
    "metrics_averaged": Fault(metrics_averaged, "metrics", "metrics averaged instead of summed"),
    "metrics_not_summed": Fault(metrics_not_summed, "metrics", "metrics of one device"),
    "evaluation_with_training_weight": Fault(evaluation_with_training_weight, "evaluation", "evaluation with training's seki weight", step=3),
    "evaluation_of_ema": Fault(evaluation_of_ema, "evaluation", "evaluation of the moving average", step=3),
}


def choose(names: Iterable[str] | None, option: str, shard_state: str = "none") -> list[str]:
    """The faults of that `option`, or all that can be planted. ConfigError names one that does not exist or does not go with `shard_state`."""
    possible = [name for name, fault in FAULTS.items() if shard_state == "none" or not fault.whole]
    for name in names or ():
        if name not in FAULTS:
            raise ConfigError(f"{option} {name}: choose from {', '.join(possible)}")
        if name not in possible:
            raise ConfigError(f"{option} {name}: not with --shard-state {shard_state}: parameters gathered from shares vary over the devices by themselves")
    return list(names or possible)
