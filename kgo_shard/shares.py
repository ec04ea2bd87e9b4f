"""How the state is split over the devices under --shard-state data: every device keeps a share of every leaf.

A leaf is flattened (stacked blocks: layer by layer), padded with zeros until the devices divide it, and cut into contiguous
shares: (D, layers, n), of which a device holds (1, layers, n). Which leaf has how many layers is the model's layout alone, so
the shares do not depend on the optimizer. A scalar has nothing to split. Works on NumPy and on JAX arrays.
"""

import dataclasses
import math

import jax
import numpy as np

from .model import Net, net_shapes


def is_split(net: Net) -> bool:
    return np.ndim(net.norm.weight) == 3


def whole_shapes(net: Net) -> Net:
    """The shapes and dtypes of its parameters, whether it is split or not."""
    return net_shapes(net.config, net.stem.precision)


def num_layers(net: Net) -> Net:
    """A net-shaped tree of ints: into how many equal parts each leaf falls before it is cut."""
    ones = jax.tree.map(lambda _: 1, whole_shapes(net))
    layers = net.config.num_layers if net.config.stacked else 1
    return dataclasses.replace(ones, blocks=jax.tree.map(lambda _: layers, ones.blocks))


def share_size(numbers: int, devices: int) -> int:
    """Numbers in each device's share of `numbers`, the last ones padding. At least two: XLA arranges the arithmetic of a single number
    otherwise than an array's."""
    return max(2, -(-numbers // devices))


def cut(leaf, layers: int, devices: int):
    """A whole leaf of any shape -> (devices, layers, n), zeros at the end where the devices do not divide it."""
    if not leaf.shape:
        return leaf
    xp = np if isinstance(leaf, np.ndarray) else jax.numpy
    rows = leaf.reshape(layers, -1)
    n = share_size(rows.shape[1], devices)
    rows = xp.pad(rows, ((0, 0), (0, devices * n - rows.shape[1])))
    return rows.reshape(layers, devices, n).swapaxes(0, 1)


def join(shares, shape: tuple[int, ...]):
    """(devices, layers, n) -> the whole leaf of `shape`. Inverse of `cut`."""
    if not shape:
        return shares
    devices, layers, n = shares.shape
    rows = shares.swapaxes(0, 1).reshape(layers, devices * n)
    return rows[:, : math.prod(shape) // layers].reshape(shape)


def cut_net(net: Net, devices: int) -> Net:
    return jax.tree.map(lambda leaf, layers: cut(leaf, layers, devices), net, num_layers(net))


def join_net(net: Net) -> Net:
    """The net with whole leaves; one that is not split is itself. Scalars (second moments that Muon does not keep) stay scalars."""
    if not is_split(net):
        return net
    return jax.tree.map(lambda leaf, like: join(leaf, like.shape if leaf.shape else ()), net, whole_shapes(net))
