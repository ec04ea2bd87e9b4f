"""Time the parts of a training step, for --component-profile: the network's own functions, on one device and one batch.

Every part gets the inputs that it has in a forward pass, and is compiled apart: the parts do not sum to the whole, where
the compiler works across their borders. The loss takes evaluation's constant seki weight: a few operations less. FLOPs are the model's (flops.py), not those that the program does.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from . import augment, layout, loss, mesh, optim
from .config import Config
from .flops import forward_flops, muon_flops
from .model import Block, Net, Stem, Tables, make_tables
from .state import Learned, TrainState
from .step import Batch, make_train_step, update


def profile_components(state: TrainState, batch: Batch, config: Config) -> Iterator[str]:
    """One line for each part as soon as it is timed; `state` stays as it is."""
    flops = {name: config.batch_size * count for name, count in forward_flops(config.model).items()}
    flops |= {"loss": 0, "objective": flops["forward"]}

    def line(name, what, call, num_flops):
        seconds = measure(call, config.component_profile_repeats)
        return component_line(name, what, seconds, num_flops)

    parts = make_parts(state.learned.net, jax.jit(augment.expand, static_argnums=1)(batch, config.pos_len), make_tables(config.model), config.loss_profile)
    for name in ("stem", "attention", "ffn", "block", "trunk", "heads", "loss", "forward"):
        yield line(name, "forward", compiled(*parts[name]), flops[name])
    if config.component_profile_grad:
        for name in ("stem", "attention", "ffn", "block", "trunk", "objective"):
            function, *inputs = parts[name]
            yield line(name, "forward+backward", compiled(with_backward(function), *inputs), 3 * flops[name])
    yield line("optimizer", "update", make_update(state, config), muon_flops(config) if config.optimizer == "muon" else 0)
    yield line("step", "training", make_step(state, batch, config), 3 * flops["forward"])


def make_parts(net: Net, rows: dict[str, jax.Array], tables: Tables, profile: str) -> dict[str, tuple]:
    """name -> (function, what it is differentiated by, other inputs...), with `rows` as the model reads them."""
    planes, global_inputs = rows[layout.PLANES], rows[layout.GLOBALS]
    block = first_block(net)
    seki_weight = jnp.float32(loss.EVALUATION_SEKI_WEIGHT)

    def with_tables(inputs):
        module, x = inputs
        return module(x, tables)

    def trunk(inputs):
        # Not by the whole net: the parts that the trunk does not have would be filled with zero gradients.
        blocks, norm, x = inputs
        return dataclasses.replace(net, blocks=blocks, norm=norm).trunk(x, tables)

    def forward(net, planes, global_inputs):
        return net(planes, global_inputs, tables)

    def terms(outputs, rows):
        return loss.compute_terms(outputs, rows, seki_weight, tables, profile)

    def objective(net, rows):
        return terms(forward(net, rows[layout.PLANES], rows[layout.GLOBALS]), rows).loss

    x = jax.jit(Stem.__call__)(net.stem, planes, global_inputs)
    features = jax.jit(trunk)((net.blocks, net.norm, x))
    outputs = jax.jit(Net.heads)(net, features)
    return {
        "stem": (Stem.__call__, net.stem, planes, global_inputs),
        "attention": (with_tables, (block.attention, x)),
        "ffn": (lambda inputs: inputs[0](inputs[1]), (block.ffn, x)),
        "block": (with_tables, (block, x)),
        "trunk": (trunk, (net.blocks, net.norm, x)),
        "heads": (Net.heads, net, features),
        "loss": (terms, outputs, rows),
        "forward": (forward, net, planes, global_inputs),
        "objective": (objective, net, rows),
    }


def first_block(net: Net) -> Block:
    return net.blocks[0] if isinstance(net.blocks, tuple) else jax.tree.map(lambda leaf: leaf[0], net.blocks)


def with_backward(function: Callable) -> Callable:
    """The function's value and its gradient by the first argument, pulled back from the value itself: any cotangent costs the same."""

    def both(differentiated, *others):
        value, pull = jax.vjp(lambda inputs: function(inputs, *others), differentiated)
        return value, pull(value)

    return both


def compiled(function: Callable, *inputs) -> Callable:
    function = jax.jit(function)
    return lambda: function(*inputs)


def make_update(state: TrainState, config: Config) -> Callable:
    """The step's own update without the moving average of the parameters."""
    learned = Learned(state.learned.net, state.learned.opt_state, None, state.learned.statistics)
    gradients = jax.tree.map(jnp.copy, learned.net)  # numbers of the right shapes, in arrays of their own
    schedule = jax.tree.map(lambda x: x[0], optim.make_schedule(config, state.step, 1))
    return compiled(lambda *inputs: update(inputs[0], inputs[1], inputs[0].statistics, inputs[2], config), learned, gradients, schedule)


def make_step(state: TrainState, batch: Batch, config: Config) -> Callable:
    """The trainer's step as the trainer calls it: the batch goes up, the metrics come down, the next call continues."""
    step = make_train_step(config)
    # A copy: the step may be one that consumes its state.
    current = TrainState(mesh.put_state(mesh.make_mesh(config), state.learned), state.step, state.samples)

    def call():
        nonlocal current
        current, _ = step(current, [batch])
        return current.learned

    return call


def measure(call: Callable, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, every output awaited; a call before them compiles and warms up."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return seconds


def component_line(name: str, what: str, seconds: list[float], num_flops: int) -> str:
    """TFLOPS are those of the fastest repeat."""
    best, median = min(seconds), statistics.median(seconds)
    return (
        f"COMPONENT: name={name}, pass={what}, min={1e3 * best:.3f}ms, median={1e3 * median:.3f}ms, "
        f"flops={num_flops}, TFLOPS={num_flops / best / 1e12:.4f}"
    )
