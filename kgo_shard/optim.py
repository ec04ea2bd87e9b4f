"""The optimizer: schedule, clipping, Optax transforms, and the original's rule for applying an update.

A transform turns a gradient into a direction; `apply_direction` moves the parameters. They are two steps, and not
Optax's one sum of updates, because (p - lr * d) - lr * wd * p and p - (lr * d + lr * wd * p) differ in the last bit.
Which leaf follows which rule is said by a tree of labels. The step count t and the learning rate come in from outside:
one clock, and it is the run's.
"""

import dataclasses
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from . import convert, muon, reduce, shares
from .config import Config, Precision
from .model import Block, Net, matrices

ADAM, SGD, NONE = "adam", "sgd", "none"  # labels of leaves, beside Muon's two
MUON = (muon.BY_HEADS, muon.BY_ROWS)
ADAM_BETA1, ADAM_BETA2, ADAM_EPSILON = 0.9, 0.95, 1e-8
CLIP_EPSILON = 1e-6


class Schedule(NamedTuple):
    """What the optimizer is told about each of K steps: (K,) float32 arrays outside the step, scalars inside."""

    count: Float[Array, "*K"]  # t, from 1
    learning_rate: Float[Array, "*K"]
    weight_decay: Float[Array, "*K"]


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of the step after `step` finished ones: linear warm-up, then a cosine to zero, or constant.

    In double precision on the host: the device's float32 cosine would be another number.
    """
    if config.lr_schedule == "constant":
        return config.lr
    warmup = max(1, config.warmup_samples // config.batch_size)
    total = max(1, config.max_training_samples // config.batch_size)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def make_schedule(config: Config, step: int, num_steps: int) -> Schedule:
    """The schedule of the `num_steps` steps after `step` finished ones, on the host: one transfer takes it to the devices with the rows."""
    steps = range(step, step + num_steps)
    return Schedule(
        count=np.array([s + 1 for s in steps], np.float32),
        learning_rate=np.array([learning_rate(config, s) for s in steps], np.float32),
        weight_decay=np.full(num_steps, config.wd, np.float32),
    )


def decay_labels(net: Net) -> Net:
    """A net-shaped tree of bools: matrices and the stem's kernel decay, biases and norm weights do not."""
    return matrices(net)


def global_norm(gradients: Net) -> Float[Array, ""]:
    """Euclidean norm over all leaves, float32; the leaves' sums are added in the original's order."""
    leaves = convert.to_named(gradients)
    sums = share_squares(gradients) if shares.is_split(gradients) else {name: squares(leaf) for name, leaf in leaves.items()}
    total = jnp.float32(0)
    for name in leaves:
        total = total + sums[name]
    return jnp.sqrt(total)


def squares(leaf: Array) -> Float[Array, ""]:
    leaf = leaf.astype(jnp.float32)
    return jnp.sum(leaf * leaf)


def share_squares(gradients: Net) -> dict[str, Float[Array, ""]]:
    """The sums of squares of leaves in shares. A sum's last bits depend on its order: so each leaf is put together on one device, which
    adds it up as a device that has all leaves does. Leaves of one shape are dealt out together; all sums come back in one vector."""
    leaves, own_sums = convert.to_named(gradients), {}
    shapes = {name: (like.shape, leaves[name].shape) for name, like in convert.to_named(shares.whole_shapes(gradients)).items()}
    for shape, share in dict.fromkeys(shapes.values()):
        names = tuple(name for name in shapes if shapes[name] == (shape, share))
        own = reduce.deal(jnp.concatenate([leaves[name] for name in names]))
        whole = jax.lax.optimization_barrier([shares.join(leaf, shape) for leaf in own])  # else XLA sums up the shares as they lie
        own_sums[names] = jnp.stack([squares(leaf) for leaf in whole])
    by_device, sums, taken = reduce.gather_numbers(jnp.concatenate(list(own_sums.values()))), {}, 0
    for names, own in own_sums.items():
        sums |= zip(names, by_device[:, taken : taken + len(own)].ravel(), strict=False)  # the last ones may be of zeros
        taken += len(own)
    return sums


def clip(gradients: Net, norm: Float[Array, ""], max_norm: float) -> Net:
    """g * min(1, c / (norm + 1e-6)). Optax's clip has no epsilon, which is 2 % at a norm of 5e-5."""
    factor = jnp.minimum(1.0, max_norm / (norm + CLIP_EPSILON))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)


def rule_labels(net: Net, config: Config) -> Net:
    """A net-shaped tree of labels: the rule by which each leaf is updated."""
    net = shares.whole_shapes(net) if config.splits_state else net
    everywhere = {"adamw": ADAM, "muon": ADAM, "sgd": SGD, "none": NONE}[config.optimizer]
    labels = jax.tree.map(lambda _: everywhere, net)
    if config.optimizer != "muon":
        return labels

    def label(block):
        return muon.label_block(block, config.muon_target, everywhere)

    blocks = jax.tree.map(label, net.blocks, is_leaf=lambda part: isinstance(part, Block))
    return dataclasses.replace(labels, blocks=blocks)


class Moments(NamedTuple):
    """What the optimizer remembers: net-shaped, in the state dtype.

    v of Muon's leaves is a scalar zero; SGD has both and moves neither, as the original's files have it.
    """

    m: Net
    v: Net


def zeros_like(params: Net, precision: Precision) -> Net:
    return jax.tree.map(lambda p: jnp.zeros(p.shape, precision.opt_state), params)


def scale_by_adam(precision: Precision) -> optax.GradientTransformationExtraArgs:
    """g -> m_hat / (sqrt(v_hat) + eps), Kingma and Ba (2015), with this trainer's betas 0.9 and 0.95.

    Arithmetic in the update dtype, also 1 - beta: in float32 that is 0.10000002, not 0.1. `update` needs `count`, the
    float32 step number from 1.
    """
    dtype = precision.opt_update

    def init(params):
        return Moments(zeros_like(params, precision), zeros_like(params, precision))  # one shared tree could not be donated

    def update(gradients, state, params=None, *, count, **_):
        beta1, beta2, epsilon = (jnp.asarray(x, dtype) for x in (ADAM_BETA1, ADAM_BETA2, ADAM_EPSILON))
        t = count.astype(dtype)

        def leaf(g, m, v):
            g, m, v = (x.astype(dtype) for x in (g, m, v))
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * (g * g)
            # The corrections stay inside, once a leaf as in the original: where leaves share them, XLA divides otherwise.
            m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
            return m_hat / (jnp.sqrt(v_hat) + epsilon), m.astype(precision.opt_state), v.astype(precision.opt_state)

        leaves = jax.tree.map(leaf, gradients, state.m, state.v)
        direction, m, v = jax.tree.transpose(jax.tree.structure(gradients), jax.tree.structure((0, 0, 0)), leaves)
        return direction, Moments(m, v)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_muon(cut: str, config: Config) -> optax.GradientTransformationExtraArgs:
    """g -> the orthogonalised momentum, Jordan et al. (2024); the momentum 0.95 m + g is a sum, not an average.

    For the block matrices with the label `cut` (see muon.py); all other leaves are None.
    """
    precision = config.precision
    dtype = precision.opt_update

    def init(params):
        placeholders = jax.tree.map(lambda p: jnp.zeros((), precision.opt_state), params)
        return Moments(zeros_like(params, precision), placeholders)

    def update(gradients, state, params=None, **_):
        momentum = jnp.asarray(config.muon_momentum, dtype)
        m = jax.tree.map(lambda g, m: momentum * m.astype(dtype) + g.astype(dtype), gradients, state.m)
        direction = dataclasses.replace(m, blocks=muon.directions(m.blocks, cut, config))
        return direction, state._replace(m=jax.tree.map(lambda m: m.astype(precision.opt_state), m))

    return optax.GradientTransformationExtraArgs(init, update)


def keep_gradients(precision: Precision) -> optax.GradientTransformationExtraArgs:
    """The gradient is the direction; the moments stay as they are: zero, or what the checkpoint had."""

    def init(params):
        return Moments(zeros_like(params, precision), zeros_like(params, precision))

    def update(gradients, state, params=None, **_):
        return jax.tree.map(lambda g: g.astype(precision.opt_update), gradients), state

    return optax.GradientTransformationExtraArgs(init, update)


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """The transform that turns clipped gradients into directions, each leaf by its label's rule.

    optax.partition would do, but keeps a state for each label; this one's state is whole: two net-shaped trees.
    """
    rules = {
        ADAM: scale_by_adam(config.precision),
        SGD: keep_gradients(config.precision),
        NONE: keep_gradients(config.precision),
        muon.BY_HEADS: scale_by_muon(muon.BY_HEADS, config),
        muon.BY_ROWS: scale_by_muon(muon.BY_ROWS, config),
    }

    def masks(tree: Net):
        labels = rule_labels(tree, config)
        return {label: jax.tree.map(lambda own: own == label, labels) for label in rules if label in jax.tree.leaves(labels)}

    def init(params):
        return eqx.combine(*(rules[label].init(eqx.filter(params, mask)) for label, mask in masks(params).items()))

    def update(gradients, state, params=None, **extra):
        updated = [
            rules[label].update(eqx.filter(gradients, mask), eqx.filter(state, Moments(mask, mask)), **extra)
            for label, mask in masks(gradients).items()
        ]
        return tuple(eqx.combine(*parts) for parts in zip(*updated, strict=True))

    return optax.GradientTransformationExtraArgs(init, update)


def apply_direction(params: Net, direction: Net, schedule: Schedule, config: Config) -> Net:
    """The parameters moved by lr and wd, in the update dtype, stored in their own; master copies, where they are asked for, are moved in theirs if it is wider.

    AdamW and SGD: p - lr * d - lr * wd * p, the last part only for decayed leaves. Muon: p * (1 - lr * wd) - 0.2 * lr * d.
    """
    precision = config.precision
    dtype = precision.opt_update if config.master_dtype == "param" else jnp.promote_types(precision.opt_update, precision.master)
    rate, decay = schedule.learning_rate.astype(dtype), schedule.weight_decay.astype(dtype)
    multiplier = jnp.asarray(config.muon_lr_multiplier, dtype)

    def move(p, d, rule, decays):
        if rule == NONE:
            return p
        old = p.astype(dtype)
        if rule in MUON:
            new = old * (1 - rate * decay) - (multiplier * rate) * d.astype(dtype)
        else:
            new = old - rate * d.astype(dtype)
            new = new - rate * decay * old if decays else new
        return new.astype(p.dtype)

    return jax.tree.map(move, params, direction, rule_labels(params, config), decay_labels(params))


def update_ema(ema: Net, params: Net, decay: float) -> Net:
    """decay * ema + (1 - decay) * params, float32; 1 - decay is taken in double precision, as the original does."""
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(jnp.float32), ema, params)
