"""The mesh, and where every array lives on it.

All placement is this module's rule table; nothing else may assume that something is replicated or split.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .config import Config, ConfigError

AXIS = "data"

# Leaf path -> placement; the first pattern that matches holds.
RULES = (
    ("state/*", PartitionSpec()),  # every device holds the whole state
    ("shares/*", PartitionSpec(AXIS)),  # or, with --shard-state data, its share of every leaf, as shares.py cuts them
    ("batch/*", PartitionSpec(None, AXIS)),  # (K, B, ...): steps whole, rows in contiguous shares
    ("schedule/*", PartitionSpec()),  # (K,) step counts, learning rates, weight decays
    ("result/*", PartitionSpec()),  # summed metrics, gradients
    ("local/*", PartitionSpec(AXIS)),  # a probe's per-device values, one leading row a device
)


def make_mesh(config: Config) -> Mesh:
    """A mesh of one axis over the run's devices, in the order of `jax.local_devices()`, as pmap has it.

    Raises ConfigError where there are too few devices or the batch does not divide by them.
    """
    devices = jax.local_devices()
    count = (config.data_parallel_devices or len(devices)) if config.data_parallel else 1
    if count > len(devices):
        raise ConfigError(f"data_parallel_devices is {count} but this process has {len(devices)}: ask for fewer, or have more: logical ones with XLA_FLAGS=--xla_force_host_platform_device_count={count}")
    if config.batch_size % count:
        raise ConfigError(f"batch_size {config.batch_size} does not divide by the {count} devices")
    return Mesh(np.array(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def spec_of(path: str) -> PartitionSpec:
    for pattern, spec in RULES:
        if fnmatchcase(path, pattern):
            return spec
    raise KeyError(f"no placement rule for {path}")


def spec_for(path: str, leaf) -> PartitionSpec:
    """By the rules; a scalar has nothing to split."""
    spec = spec_of(path)
    return spec if np.ndim(leaf) else PartitionSpec()


def state_kind(config: Config) -> str:
    """The kind of placement that the run's state has."""
    return "shares" if config.splits_state else "state"


def specs(tree, kind: str):
    """The PartitionSpec of every leaf of `tree`, whose leaves' paths begin with `kind`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: spec_for(kind + "/" + jax.tree_util.keystr(path), leaf), tree)


def shard(body: Callable, mesh: Mesh, inputs: tuple[str, ...], outputs: str | tuple[str, ...]) -> Callable:
    """`body` as each device runs it, over the mesh: arguments and results placed by the rules of their kinds.

    The check of varying types stays on: a result that the rules call replicated is proved to be.
    """

    def call(*arguments):
        in_specs = tuple(specs(argument, kind) for argument, kind in zip(arguments, inputs, strict=True))

        def out_spec(kind):  # a result of an argument's kind has the argument's structure
            return in_specs[inputs.index(kind)] if kind in inputs else spec_of(kind + "/")

        out_specs = out_spec(outputs) if isinstance(outputs, str) else tuple(map(out_spec, outputs))
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)(*arguments)

    return call


def put(mesh: Mesh, tree, kind: str):
    """Place host or device arrays by the rules; no device array is shared with the input, so either may be donated."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, kind), is_leaf=_is_spec)
    # A single device's array that is replicated keeps its buffer on its own device, whatever may_alias says: hence the copy.
    copies = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)
    return jax.device_put(copies, shardings, may_alias=False)


def put_state(mesh: Mesh, state):
    return put(mesh, state, "state")


def put_batches(mesh: Mesh, batches: Sequence[dict[str, np.ndarray]]):
    """K host batches, stacked along a new first axis, their rows split over the devices in contiguous shares."""
    return put(mesh, jax.tree.map(lambda *rows: np.stack(rows), *batches), "batch")


def _is_spec(x) -> bool:
    return isinstance(x, PartitionSpec)
