"""Learning rate, clipping, AdamW, Muon, SGD and EMA over parameter dicts (spec, section 5). No optimizer library: its own
arithmetic, in order. `update` chooses the rule of each leaf."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import dtypes_of

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
HEAD_LAYERS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
MUON_LAYERS = {"attn": (*HEAD_LAYERS, "out_proj"), "ffn": ("ffn_w1", "ffn_wgate", "ffn_w2", "ffn_upgate")}
POLAR_COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


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


def is_muon(names, shape, config):
    """Whether Muon updates the leaf: a block's matrix (its last two axes) that --muon-target names."""
    if config.optimizer != "muon" or names[0] != "blocks" or names[-1] != "w" or len(shape) < 2:
        return False
    if config.muon_target == "square":
        return shape[-1] == shape[-2]
    return config.muon_target == "all" or names[-2] in MUON_LAYERS.get(config.muon_target, ())


def init_opt_state(params, config):
    """{"m": tree, "v": tree} of zeros in opt_state_dtype, two separate trees (they may be donated).

    Every optimizer keeps both; v of a Muon leaf is a scalar.
    """
    dtype = dtypes_of(config).opt_state

    def v(path, p):
        return jnp.zeros(() if is_muon(path_names(path), p.shape, config) else p.shape, dtype)

    return {"m": jax.tree_util.tree_map(lambda p: jnp.zeros(p.shape, dtype), params), "v": jax.tree_util.tree_map_with_path(v, params)}


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


def split_matrices(m, layer, config):
    """(..., rows, cols) -> the matrices that are orthogonalised: a head's rows each, or chunks of --muon-row-split-size rows."""
    *lead, rows, cols = m.shape
    size = config.muon_row_split_size
    if layer in HEAD_LAYERS:
        size = config.model_config["hidden_size"] // config.model_config["num_heads"]
    elif not 0 < size < rows or rows % size:
        return m
    return m.reshape(*lead, rows // size, size, cols)


def polar(x, steps, dtype):
    """Nearly the orthogonal factor of each matrix of (..., rows, cols), by `steps` steps of a quintic iteration."""
    x = x.astype(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = jnp.swapaxes(x, -1, -2)
    full = x.astype(jnp.promote_types(dtype, np.float32))
    norm = jnp.sqrt(jnp.sum(full * full, axis=(-2, -1), keepdims=True))
    x = (full / (1.02 * norm + 1e-6)).astype(dtype)
    for a, b, c in POLAR_COEFFICIENTS[:steps]:
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x


def orthogonal_momenta(momenta, config):
    """{names: m} -> {names: its pieces, orthogonalised}. With --muon-group-blocks the same leaf of all blocks goes through as one
    stack."""
    def orthogonal(m, layer):
        return polar(split_matrices(m, layer, config), config.muon_polar_steps, dtypes_of(config).polar)

    if config.stack_blocks or not config.muon_group_blocks:
        return {names: orthogonal(m, names[-2]) for names, m in momenta.items()}
    groups, result = {}, {}
    for names in momenta:
        groups.setdefault(names[-2], []).append(names)
    for layer, members in groups.items():
        stacked = orthogonal(jnp.stack([momenta[names] for names in members]), layer)
        result.update({names: stacked[i] for i, names in enumerate(members)})
    return result


def muon_update(leaves, lr, wd, config):
    """{names: (p, g, m)} -> {names: (new p, new m)}; the momentum is a sum, without 1 - beta."""
    dtype = dtypes_of(config).opt_update
    lr, wd, beta, multiplier = (jnp.asarray(value, dtype) for value in (lr, wd, config.muon_momentum, config.muon_lr_multiplier))
    momenta = {names: beta * m.astype(dtype) + g.astype(dtype) for names, (_, g, m) in leaves.items()}
    pieces = orthogonal_momenta(momenta, config)
    new = {}
    for names, (p, _, m) in leaves.items():
        # Scaled leaf by leaf: with a slice of the stack between scale and learning rate XLA would not fold the two.
        scale = jnp.asarray(math.sqrt(max(pieces[names].shape[-2:])), pieces[names].dtype)
        direction = (pieces[names] * scale).reshape(p.shape).astype(dtype)
        p1 = p.astype(dtype) * (1.0 - lr * wd) - (multiplier * lr) * direction
        new[names] = p1.astype(p.dtype), momenta[names].astype(m.dtype)
    return new


def sgd_leaf(p, g, lr, wd, decayed, dtypes):
    dtype = dtypes.opt_update
    lr, wd, p0 = lr.astype(dtype), wd.astype(dtype), p.astype(dtype)
    p1 = p0 - lr * g.astype(dtype)
    if decayed:
        p1 = p1 - (lr * wd) * p0
    return p1.astype(p.dtype)


def update(params, grads, opt_state, t, lr, wd, config):
    """One optimizer step, t counting from 1. Returns (params, opt_state)."""
    dtypes = dtypes_of(config)
    if config.optimizer == "none":
        return params, opt_state
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    names, old = [path_names(path) for path, _ in paths], [p for _, p in paths]
    grads, m, v = (jax.tree_util.tree_leaves(tree) for tree in (grads, opt_state["m"], opt_state["v"]))
    if config.optimizer == "sgd":
        return structure.unflatten(sgd_leaf(p, g, lr, wd, is_decayed(name), dtypes) for name, p, g in zip(names, old, grads)), opt_state
    muon = muon_update({name: (p, g, m0) for name, p, g, m0 in zip(names, old, grads, m) if is_muon(name, p.shape, config)}, lr, wd, config)
    new = [(*muon[name], v0) if name in muon else adamw_leaf(p, g, m0, v0, t, lr, wd, is_decayed(name), dtypes)
           for name, p, g, m0, v0 in zip(names, old, grads, m, v)]
    p, m, v = (structure.unflatten(part) for part in zip(*new))
    return p, {"m": m, "v": v}


def update_ema(ema, params, config):
    """d*ema + (1-d)*params in the full dtype; d and 1-d are Python numbers, so 1-d is rounded once, from a double."""
    decay, full = config.ema_decay, dtypes_of(config).full
    keep, take = np.asarray(decay, full), np.asarray(1.0 - decay, full)
    return jax.tree_util.tree_map(lambda e, p: keep * e + take * p.astype(full), ema, params)
