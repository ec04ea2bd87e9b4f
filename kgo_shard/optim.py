"""The optimizer: schedule, clipping, Optax transforms, and the original's rule for applying an update.

A transform turns a gradient into a direction; `apply_direction` moves the parameters. They are two steps, and not
Optax's one sum of updates, because (p - lr * d) - lr * wd * p and p - (lr * d + lr * wd * p) differ in the last bit.
The step count t and the learning rate come in from outside: one clock, and it is the run's.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from . import convert
from .config import Config, Precision
from .model import Linear, Net, RMSNorm

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
    """The schedule of the `num_steps` steps after `step` finished ones."""
    steps = range(step, step + num_steps)
    return Schedule(
        count=jnp.array([s + 1 for s in steps], jnp.float32),
        learning_rate=jnp.array([learning_rate(config, s) for s in steps], jnp.float32),
        weight_decay=jnp.full(num_steps, config.wd, jnp.float32),
    )


def decay_labels(net: Net) -> Net:
    """A net-shaped tree of bools: True for matrices and the stem's kernel, False for biases and norm weights."""

    def label(part):
        if isinstance(part, Linear):
            return dataclasses.replace(part, weight=True, bias=None if part.bias is None else False)
        if isinstance(part, RMSNorm):
            return dataclasses.replace(part, weight=False)
        return True

    return jax.tree.map(label, net, is_leaf=lambda part: isinstance(part, (Linear, RMSNorm)))


def global_norm(gradients: Net) -> Float[Array, ""]:
    """Euclidean norm over all leaves, float32; the leaves' sums are added in the original's order."""
    total = jnp.float32(0)
    for leaf in convert.to_named(gradients).values():
        leaf = leaf.astype(jnp.float32)
        total = total + jnp.sum(leaf * leaf)
    return jnp.sqrt(total)


def clip(gradients: Net, norm: Float[Array, ""], max_norm: float) -> Net:
    """g * min(1, c / (norm + 1e-6)). Optax's clip has no epsilon, which is 2 % at a norm of 5e-5."""
    factor = jnp.minimum(1.0, max_norm / (norm + CLIP_EPSILON))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)


class AdamState(NamedTuple):
    """Moments, net-shaped, in the state dtype."""

    m: Any
    v: Any


def scale_by_adam(precision: Precision) -> optax.GradientTransformationExtraArgs:
    """g -> m_hat / (sqrt(v_hat) + eps), Kingma and Ba (2015), with this trainer's betas 0.9 and 0.95.

    Arithmetic in the update dtype, also 1 - beta: in float32 that is 0.10000002, not 0.1. `update` needs `count`, the
    float32 step number from 1.
    """
    dtype = precision.opt_update

    def init(params):
        zeros = lambda: jax.tree.map(lambda p: jnp.zeros(p.shape, precision.opt_state), params)  # noqa: E731
        return AdamState(zeros(), zeros())  # two trees: one shared tree could not be donated

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
        return direction, AdamState(m, v)

    return optax.GradientTransformationExtraArgs(init, update)


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """The transform that turns clipped gradients into directions."""
    return scale_by_adam(config.precision)


def apply_direction(params: Net, direction: Net, schedule: Schedule, precision: Precision) -> Net:
    """p - lr * direction - lr * wd * p (the last part only for decayed leaves), stored in the parameter dtype."""
    dtype = precision.opt_update
    rate, decay = schedule.learning_rate.astype(dtype), schedule.weight_decay.astype(dtype)

    def move(p, d, decays):
        old = p.astype(dtype)
        new = old - rate * d
        return (new - rate * decay * old if decays else new).astype(p.dtype)

    return jax.tree.map(move, params, direction, decay_labels(params))


def update_ema(ema: Net, params: Net, decay: float) -> Net:
    """decay * ema + (1 - decay) * params, float32; 1 - decay is taken in double precision, as the original does."""
    return jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(jnp.float32), ema, params)
