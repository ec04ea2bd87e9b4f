"""Somebody else's migration, proved with the same harness: an Equinox MLP under filter_pmap with stock optax.adamw, and its port.

    python examples/mlp_migration.py            exit code 0: equal bits; 1: they differ, and the first leaf is named
    python examples/mlp_migration.py --naive    the port that everybody writes first
"""

import argparse
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_disable_hlo_passes=fusion --xla_cpu_max_isa=SSE4_2"  # exact mode: before JAX starts

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from kgo_shard.diff.run import compare_steps  # noqa: E402
from kgo_shard.reduce import to_local  # noqa: E402

DEVICES = 4
OPTIMIZER = optax.adamw(1e-2)


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def update(model, opt_state, gradients):
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state


def init():
    model = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.PRNGKey(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def named(**trees):
    """What is compared: flat names, each below one of the harness's stages."""
    leaves = {stage: jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array)) for stage, tree in trees.items()}
    return {f"{stage}/{jax.tree_util.keystr(path)}": leaf for stage, pairs in leaves.items() for path, leaf in pairs}


class Old:
    """The original: replicas along a leading axis, pmean of each device's gradient."""

    def start(self):
        self.body = eqx.filter_pmap(self.one, axis_name="data")
        return jax.tree.map(lambda x: jnp.stack([x] * DEVICES) if eqx.is_array(x) else x, init())

    def one(self, state, x, y):
        model, opt_state = state
        gradients = jax.lax.pmean(eqx.filter_grad(loss)(model, x, y), "data")
        return update(model, opt_state, gradients), gradients

    def step(self, state, batch):
        state, gradients = self.body(state, *(part.reshape(DEVICES, -1, part.shape[-1]) for part in batch))
        return state, named(reduced_gradient=first(gradients))

    def to_host(self, state):
        model, opt_state = first(state)
        return named(parameters=model, moments=opt_state)


def first(tree):
    """Replica 0."""
    return jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, tree)


class New:
    """The port: one shard_map over a mesh, with the check of replication on."""

    def __init__(self, naive=False):
        self.cast = (lambda tree: tree) if naive else to_local  # naive: autodiff sums by itself, and the mean comes on top

    def start(self):
        arrays, self.static = eqx.partition(init(), eqx.is_array)
        mesh, rows = Mesh(np.array(jax.devices()[:DEVICES]), ("data",)), PartitionSpec("data")
        self.body = jax.jit(jax.shard_map(self.one, mesh=mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=PartitionSpec()))
        return arrays

    def one(self, arrays, x, y):
        model, opt_state = eqx.combine(arrays, self.static)
        local = eqx.combine(self.cast(eqx.filter(model, eqx.is_array)), model)
        gradients = jax.lax.pmean(eqx.filter_grad(loss)(local, x, y), "data")
        return eqx.filter((update(model, opt_state, gradients), gradients), eqx.is_array)

    def step(self, arrays, batch):
        arrays, gradients = self.body(arrays, *batch)
        return arrays, named(reduced_gradient=gradients)

    def to_host(self, arrays):
        model, opt_state = arrays
        return named(parameters=model, moments=opt_state)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--naive", action="store_true", help="the port that everybody writes first")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rng = np.random.default_rng(0)
    batches = [tuple(rng.standard_normal((16, n)).astype(np.float32) for n in (3, 2)) for _ in range(5)]
    comparison = compare_steps(Old(), New(arguments.naive), batches)
    print(comparison.verdict())
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(main())
