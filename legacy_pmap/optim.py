"""Learning rate, clipping, AdamW and EMA over parameter dicts (spec, section 5). No optimizer library: its own arithmetic, in order.

The next issue adds Muon, SGD and none beside `adamw`; `update` is the place that chooses.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import dtypes_of

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def learning_rate(step, config):
    """Rate of the step counted from 0: a Python double, to be rounded once. No clamp past the end, as in the spec."""
    if config.lr_schedule == "constant":
        return config.lr
    warmup = max(1, config.warmup_samples // config.batch_size)
    total = max(1, config.max_training_samples // config.batch_size)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def path_names(path):
    """A jax key path as plain strings: ("blocks", "0", "q_proj", "w")."""
    return tuple(str(getattr(part, "key", getattr(part, "idx", None))) for part in path)


def flatten(tree, prefix=""):
    """Nested dicts and lists -> {"blocks/0/q_proj/w": leaf} in JAX's (sorted) order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {prefix + "/".join(path_names(path)): leaf for path, leaf in leaves}


def is_decayed(names):
    """Weight decay: leaves named `w` with no `norm` in their path."""
    return names[-1] == "w" and not any("norm" in name for name in names)


def init_opt_state(params, config):
    """{"m": tree, "v": tree} of zeros in opt_state_dtype, two separate trees (they may be donated)."""
    dtype = dtypes_of(config).opt_state
    return {name: jax.tree_util.tree_map(lambda p: jnp.zeros(p.shape, dtype), params) for name in ("m", "v")}


def global_norm(grads, config):
    """Norm of the whole tree in the full dtype; the leaves' sums are added in sorted key order, starting from 0."""
    total = jnp.zeros((), dtypes_of(config).full)
    for leaf in jax.tree_util.tree_leaves(grads):
        leaf = leaf.astype(total.dtype)
        total = total + jnp.sum(leaf * leaf)
    return jnp.sqrt(total)


def clip(grads, norm, limit):
    """g * min(1, c / (norm + 1e-6)), each leaf in its own dtype."""
    scale = jnp.minimum(1.0, limit / (norm + 1e-6))
    return jax.tree_util.tree_map(lambda g: (g * scale).astype(g.dtype), grads)


def adamw_leaf(p, g, m, v, t, lr, wd, decayed, dtypes):
    """One leaf; everything in opt_update_dtype. Returns the new (p, m, v) in their stored dtypes."""
    dtype = dtypes.opt_update
    # Constants of the update dtype, and 1 - beta computed in it: 0.10000002 in float32, not 0.1.
    one, beta1, beta2, eps = (jnp.asarray(value, dtype) for value in (1.0, BETA1, BETA2, EPS))
    t, lr, wd = t.astype(dtype), lr.astype(dtype), wd.astype(dtype)
    p0, g, m0, v0 = (x.astype(dtype) for x in (p, g, m, v))
    m1 = beta1 * m0 + (one - beta1) * g
    v1 = beta2 * v0 + (one - beta2) * (g * g)
    m_hat = m1 / (one - beta1**t)
    v_hat = v1 / (one - beta2**t)
    p1 = p0 - lr * (m_hat / (jnp.sqrt(v_hat) + eps))
    if decayed:
        p1 = p1 - lr * wd * p0
    return p1.astype(p.dtype), m1.astype(m.dtype), v1.astype(v.dtype)


def update(params, grads, opt_state, t, lr, wd, config):
    """One optimizer step, t counting from 1. Returns (params, opt_state)."""
    dtypes = dtypes_of(config)
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = jax.tree_util.tree_leaves
    new = [adamw_leaf(p, g, m, v, t, lr, wd, is_decayed(path_names(path)), dtypes)
           for (path, p), g, m, v in zip(paths, leaves(grads), leaves(opt_state["m"]), leaves(opt_state["v"]))]
    p, m, v = (structure.unflatten(part) for part in zip(*new))
    return p, {"m": m, "v": v}


def update_ema(ema, params, config):
    """d*ema + (1-d)*params in the full dtype; d and 1-d are Python numbers, so 1-d is rounded once, from a double."""
    decay, full = config.ema_decay, dtypes_of(config).full
    keep, take = np.asarray(decay, full), np.asarray(1.0 - decay, full)
    return jax.tree_util.tree_map(lambda e, p: keep * e + take * p.astype(full), ema, params)
