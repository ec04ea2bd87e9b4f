"""Somebody else's migration, proved with the same harness: an Equinox MLP under pmap with stock optax.adamw, and its port.

    python examples/mlp_migration.py            exit code 0: equal bits; 1: they differ, and the first leaf is named
    python examples/mlp_migration.py --naive    the port that everybody writes first
"""

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


def loss(params, static, x, y):
    return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)


def update(params, opt_state, gradients):
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def init():
    params, static = eqx.partition(eqx.nn.MLP(3, 2, 8, 2, key=jax.random.PRNGKey(0)), eqx.is_array)
    return (params, OPTIMIZER.init(params)), static


def named(params, opt_state):
    """What is compared: flat names, each below one of the harness's stages."""
    trees = {"parameters": params, "moments": opt_state}
    return {f"{stage}/{jax.tree_util.keystr(path)}": leaf for stage, tree in trees.items() for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


class Old:
    """The original: replicas along a leading axis, pmean of each device's gradient."""

    def start(self):
        state, self.static = init()
        self.body = jax.pmap(self.one, axis_name="data", devices=jax.devices()[:DEVICES])
        return jax.tree.map(lambda x: jnp.stack([x] * DEVICES), state)

    def one(self, state, x, y):
        gradients = jax.lax.pmean(jax.grad(loss)(state[0], self.static, x, y), "data")
        return update(*state, gradients), gradients

    def step(self, state, batch):
        state, gradients = self.body(state, *(part.reshape(DEVICES, -1, part.shape[-1]) for part in batch))
        return state, {f"reduced_gradient/{i}": g[0] for i, g in enumerate(jax.tree.leaves(gradients))}

    def to_host(self, state):
        return named(*jax.tree.map(lambda x: x[0], state))


class New:
    """The port: one shard_map over a mesh, with the check of replication on."""

    def __init__(self, naive=False):
        self.cast = (lambda tree: tree) if naive else to_local  # naive: autodiff sums by itself, and the mean comes on top

    def start(self):
        state, self.static = init()
        mesh, rows = Mesh(np.array(jax.devices()[:DEVICES]), ("data",)), PartitionSpec("data")
        self.body = jax.jit(jax.shard_map(self.one, mesh=mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=PartitionSpec()))
        return state

    def one(self, state, x, y):
        gradients = jax.lax.pmean(jax.grad(loss)(self.cast(state[0]), self.static, x, y), "data")
        return update(*state, gradients), gradients

    def step(self, state, batch):
        state, gradients = self.body(state, *batch)
        return state, {f"reduced_gradient/{i}": g for i, g in enumerate(jax.tree.leaves(gradients))}

    def to_host(self, state):
        return named(*state)


def main(argv=None) -> int:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rng = np.random.default_rng(0)
    batches = [tuple(rng.standard_normal((16, n)).astype(np.float32) for n in (3, 2)) for _ in range(5)]
    comparison = compare_steps(Old(), New(naive="--naive" in (argv or sys.argv[1:])), batches)
    print(comparison.verdict())
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(main())
