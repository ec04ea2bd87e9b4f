"""Faults that people make when they move a step from pmap to shard_map, planted one at a time in the new side.

Each is a context manager that replaces one function of `kgo_shard` while it is active, so the code under test carries
no switches. The harness must name each at the stage where it was planted, and never later.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from .. import augment, batches, convert, layout, loss, mesh, optim, reduce, step
from ..model import RMSNorm


class Fault(NamedTuple):
    """One planted fault and where the harness has to find it."""

    plant: Callable[[], object]  # -> context manager
    stage: str
    meaning: str
    step: int = 1  # 0: already in the state that was loaded


@contextmanager
def replaced(module, name: str, faulty) -> Iterator[None]:
    """`module.name` is `faulty(original)` for a while. Compiled functions are made anew, so none outlives the fault."""
    with mock.patch.object(module, name, faulty(getattr(module, name))):
        yield


def first_device(tree):
    """Device 0's value on every device: what `check_vma=False` silently returns for a sum that somebody forgot."""
    is_first = jax.lax.axis_index(mesh.AXIS) == 0
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), mesh.AXIS), tree)


def naive_port():
    """pmean(grad(loss)) over replicated parameters: autodiff has already summed, the mean changes nothing."""
    return replaced(step, "local_gradient", lambda original: _without_cast(original))


def _without_cast(original):
    def faulty(*arguments):
        with mock.patch.object(reduce, "to_local", lambda tree: tree):
            return original(*arguments)

    return faulty


def gradients_summed():
    return replaced(reduce, "mean_gradients", lambda _: lambda g: jax.lax.psum(g, mesh.AXIS))


def leaf_not_reduced():
    def faulty(original):
        def reduced(gradients):
            bad = first_device(gradients.blocks[1].ffn.down.weight)
            return _with(original(gradients), ".blocks[1].ffn.down.weight", bad)

        return reduced

    return replaced(reduce, "mean_gradients", faulty)


def gradients_in_bfloat16():
    def faulty(original):
        def reduced(gradients):
            low = original(jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients))
            return jax.tree.map(lambda x, g: x.astype(g.dtype), low, gradients)

        return reduced

    return replaced(reduce, "mean_gradients", faulty)


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
    return mock.patch.object(layout.Column, "lead", layout.Column.lead - 1)


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
    """In one term: the weights of the short-term optimistic policy push the value head."""

    def faulty(original):
        def term(*arguments):
            with mock.patch.object(loss, "sg", lambda x: x):
                return original(*arguments)

        return term

    return replaced(loss, "short_term_optimism_loss", faulty)


def clip_before_reduction():
    """Every device clips its own gradient by its own norm."""

    def faulty(original):
        def reduced(gradients):
            norm = optim.global_norm(gradients)
            return original(optim.clip(gradients, norm, 1.0))

        return reduced

    return replaced(reduce, "mean_gradients", faulty)


def beta_in_double():
    """1 - beta taken in double precision and rounded: 0.1, where the original has 0.10000002."""

    def faulty(original):
        def transform(precision):
            good = original(precision)

            def update(gradients, state, params=None, **extra):
                direction, new = good.update(gradients, state, params, **extra)
                exact = jax.tree.map(lambda g, m: jnp.float32(0.9) * m + jnp.float32(0.1) * g, gradients, state.m)
                return direction, new._replace(m=exact)

            return type(good)(good.init, update)

        return transform

    return replaced(optim, "scale_by_adam", faulty)


def _with(tree, path: str, value):
    """`tree` with the leaf at `path` replaced."""
    return jax.tree_util.tree_map_with_path(lambda p, leaf: value if jax.tree_util.keystr(p) == path else leaf, tree)


FAULTS = {
    "leaves_swapped": Fault(leaves_swapped, "parameters", "two leaves swapped in conversion", step=0),
    "leaf_transposed": Fault(leaf_transposed, "parameters", "one leaf transposed in conversion", step=0),
    "rows_dealt_round_robin": Fault(rows_dealt_round_robin, "batch", "rows dealt to other devices"),
    "symmetry_on_inputs_only": Fault(symmetry_on_inputs_only, "batch", "symmetry on the inputs only"),
    "history_drawn_twice": Fault(history_drawn_twice, "batch", "random draws in another order"),
    "target_column_off_by_one": Fault(target_column_off_by_one, "loss_terms", "a target column off by one"),
    "statistics_reduced_before_use": Fault(statistics_reduced_before_use, "loss_terms", "statistics averaged before use"),
    "local_weight_normalisation": Fault(local_weight_normalisation, "loss_terms", "loss divided by the local weights"),
    "naive_port": Fault(naive_port, "raw_gradient", "gradients D times too large: not cast to varying before grad"),
    "stop_gradient_dropped": Fault(stop_gradient_dropped, "raw_gradient", "stop_gradient dropped in one term"),
    "gradients_summed": Fault(gradients_summed, "reduced_gradient", "gradients summed instead of averaged"),
    "leaf_not_reduced": Fault(leaf_not_reduced, "reduced_gradient", "one leaf not reduced"),
    "gradients_in_bfloat16": Fault(gradients_in_bfloat16, "reduced_gradient", "gradients reduced in bfloat16"),
    "clip_before_reduction": Fault(clip_before_reduction, "reduced_gradient", "clipped before the reduction"),
    "schedule_off_by_one": Fault(schedule_off_by_one, "learning_rate", "learning rate off by one step"),
    "beta_in_double": Fault(beta_in_double, "moments", "1 - beta in another precision"),
    "count_off_by_one": Fault(count_off_by_one, "parameters", "optimizer's step count off by one"),
    "decay_on_norms": Fault(decay_on_norms, "parameters", "weight decay on norms"),
    "no_decay_on_a_head": Fault(no_decay_on_a_head, "parameters", "no weight decay on a head"),
    "ema_before_update": Fault(ema_before_update, "ema", "moving average taken before the update"),
    "statistics_not_averaged": Fault(statistics_not_averaged, "moving_statistics", "moving statistics not averaged"),
    "metrics_averaged": Fault(metrics_averaged, "metrics", "metrics averaged instead of summed"),
}
