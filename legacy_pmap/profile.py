"""Times the parts of a training step, for --component-profile: this stack's own functions, on one device and one batch.

Each part is compiled apart and gets the inputs that it has in a forward pass. FLOPs are the model's (flops.py).
"""

import statistics
import time

import jax
import jax.numpy as jnp

from .config import dtypes_of
from .flops import forward_flops, muon_flops
from .losses import heads_objective, objective
from .model import attention, feed_forward, forward, heads, make_tables, run_block, stem, trunk
from .optim import learning_rate, update
from .step import get_carry, make_train_step, put_state

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "out_proj")
FFN_LAYERS = ("ffn_w1", "ffn_wgate", "ffn_upgate", "ffn_w2")


def component_lines(state, batch, config):
    """Yields one line for each part as soon as it is timed; `state` stays as it is."""
    flops = {name: config.batch_size * count for name, count in forward_flops(config).items()}
    flops.update(loss=0, objective=flops["forward"])

    def line(name, kind, call, count):
        return _line(name, kind, measure(call, config.component_profile_repeats), count)

    parts = _parts(state.carry, batch, config)
    for name in ("stem", "attention", "ffn", "block", "trunk", "heads", "loss", "forward"):
        yield line(name, "forward", _compiled(*parts[name]), flops[name])
    if config.component_profile_grad:
        for name in ("stem", "attention", "ffn", "block", "trunk", "objective"):
            function, *inputs = parts[name]
            yield line(name, "forward+backward", _compiled(_with_backward(function), *inputs), 3 * flops[name])
    yield line("optimizer", "update", _update(state, config), muon_flops(config) if config.optimizer == "muon" else 0)
    yield line("step", "training", _step(state, batch, config), 3 * flops["forward"])


def _parts(carry, batch, config):
    """{name: (function, what it is differentiated by, other inputs...)}. A function is given only the leaves that it reads, because
    the gradients of all others would be written out as zeros."""
    dtypes, tables, moving = dtypes_of(config), make_tables(config), tuple(carry[3:])
    batch = {key: jnp.asarray(array, dtypes.full) for key, array in batch.items()}
    board, row = batch["binaryInputNCHW"], batch["globalInputNC"]
    of_stem = {name: carry.params[name] for name in ("conv_spatial", "linear_global")}
    of_trunk = {name: carry.params[name] for name in ("blocks", "norm_final")}
    of_heads = {name: carry.params[name] for name in ("policy_head", "value_head")}
    blocks = carry.params["blocks"]
    block = blocks[0] if isinstance(blocks, list) else jax.tree_util.tree_map(lambda leaf: leaf[0], blocks)
    of_attention = {name: block[name] for name in ATTENTION_LAYERS if name in block}
    of_ffn = {name: block[name] for name in FFN_LAYERS if name in block}

    run_stem = lambda params, board, row: stem(params, board, row, dtypes)
    run_trunk = lambda inputs: trunk(inputs[0], inputs[1], tables, config, dtypes)
    run_heads = lambda params, x: heads(params, x, config, dtypes)
    x = jax.jit(run_stem)(of_stem, board, row)
    features = jax.jit(run_trunk)((of_trunk, x))
    out = jax.jit(run_heads)(of_heads, features)
    return {
        "stem": (run_stem, of_stem, board, row),
        "attention": (lambda inputs: attention(inputs[1], inputs[0], tables, config, dtypes), (of_attention, x)),
        "ffn": (lambda inputs: feed_forward(inputs[1], inputs[0], dtypes), (of_ffn, x)),
        "block": (lambda inputs: run_block(inputs[1], inputs[0], tables, config, dtypes), (block, x)),
        "trunk": (run_trunk, (of_trunk, x)),
        "heads": (run_heads, of_heads, features),
        "loss": (lambda out, batch: heads_objective(out, batch, *moving, tables, config, training=True), out, batch),
        "forward": (lambda params, batch: forward(params, batch, tables, config), carry.params, batch),
        "objective": (lambda params, batch: objective(params, batch, *moving, tables, config, training=True)[0], carry.params, batch),
    }


def _with_backward(function):
    """Value and gradient by the first argument, pulled back from the value itself: any cotangent costs the same."""

    def both(differentiated, *others):
        value, pull = jax.vjp(lambda inputs: function(inputs, *others), differentiated)
        return value, pull(value)

    return both


def _compiled(function, *inputs):
    function = jax.jit(function)
    return lambda: function(*inputs)


def _update(state, config):
    """The optimizer, without EMA; numbers of the right shapes, in arrays of their own, stand for the gradients."""
    full, params = dtypes_of(config).full, state.carry.params
    grads = jax.tree_util.tree_map(jnp.copy, params)
    t, lr, wd = (jnp.asarray(value, full) for value in (state.step + 1, learning_rate(state.step, config), config.wd))
    return _compiled(lambda *inputs: update(*inputs, config), params, grads, state.carry.opt_state, t, lr, wd)


def _step(state, batch, config):
    """The trainer's step as the trainer calls it: the batch goes up, the metrics come down, the next call continues."""
    step = make_train_step(config)
    current = put_state(config, *get_carry(state), state.step, state.samples)  # a copy: donation would consume the state

    def call():
        nonlocal current
        current, _ = step(current, [batch])
        return current.carry

    return call


def measure(call, repeats):
    """Seconds of each of `repeats` calls, all outputs awaited; a call before them compiles and warms up."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return seconds


def _line(name, kind, seconds, flops):
    best, median = min(seconds), statistics.median(seconds)
    return (f"COMPONENT: name={name}, pass={kind}, min={1e3 * best:.3f}ms, median={1e3 * median:.3f}ms, "
            f"flops={flops}, TFLOPS={flops / best / 1e12:.4f}")
