"""Every collective of the step, each with its reason. Only these functions take the suffix `_local` off a value.

Inside `shard_map` with `check_vma=True` the type of a value says whether it varies over the mesh axis. Parameters come
in unvarying; `to_local` makes them varying before they are differentiated, because the gradient with respect to an
unvarying value is already summed over the axis: a mean taken after that would be D times too large.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from . import shares
from .config import Config
from .loss import MovingStatistics, Terms
from .mesh import AXIS
from .model import Net, matrices


def to_local(tree):
    """The same values, typed as varying over the devices: what is computed from them is each device's own."""
    if hasattr(jax.lax, "pcast"):
        return jax.tree.map(lambda x: jax.lax.pcast(x, AXIS, to="varying"), tree)
    return jax.tree.map(lambda x: jax.lax.pvary(x, AXIS), tree)  # JAX 0.7 and 0.8


def whole_net(net: Net, config: Config) -> Net:
    """The parameters that the network is run with, whole and typed as varying, from the state's.

    Shares of matrices are gathered in the compute dtype where it is the narrower one: they are cast to it anyway.
    """
    params = jax.tree.map(lambda p: p.astype(config.precision.param), net)
    if not config.splits_state:
        return to_local(params)

    def gather(share, is_matrix):
        compute = jnp.dtype(config.precision.compute)
        narrow = share.astype(compute) if is_matrix and compute.itemsize < share.dtype.itemsize else share
        return jax.lax.all_gather(narrow, AXIS, axis=0, tiled=True).astype(share.dtype)  # gradients are of the parameter dtype, as ever

    return shares.join_net(jax.tree.map(gather, params, matrices(net)))


def mean_gradients(gradients_local: Net) -> Net:
    """Mean over the devices of each device's gradient, in the gradient's dtype.

    The loss divides by the device's own rows, so with equal shards the mean of gradients is that of the mean loss.
    """
    return jax.lax.pmean(gradients_local, AXIS)


def mean_shares(gradients_local: Net) -> Net:
    """The same where the state is split: of the mean, each device gets its shares only."""
    devices = jax.lax.axis_size(AXIS)
    cut = shares.cut_net(gradients_local, devices)
    return jax.tree.map(lambda g: jax.lax.psum_scatter(g, AXIS, scatter_dimension=0, tiled=True) / devices, cut)


def deal(items: Float[Array, "N layers n"], at_least: int = 1) -> Float[Array, "k D layers n"]:
    """From every device's share of N things to all shares of k things on each device: ceil(N / D), or `at_least`; the last ones may be zeros."""
    devices = jax.lax.axis_size(AXIS)
    k = max(at_least, -(-len(items) // devices))
    items = jnp.pad(items, ((0, devices * k - len(items)), (0, 0), (0, 0)))
    dealt = jax.lax.all_to_all(items.reshape(devices, k, *items.shape[1:]), AXIS, split_axis=0, concat_axis=0, tiled=True)
    return dealt.swapaxes(0, 1)


def collect(own: Float[Array, "k D layers n"], count: int) -> Float[Array, "N layers n"]:
    """The inverse of `deal` for N = `count` things."""
    items = jax.lax.all_to_all(own.swapaxes(0, 1), AXIS, split_axis=0, concat_axis=0, tiled=True)
    return items.reshape(-1, *items.shape[2:])[:count]


def gather_numbers(own: Float[Array, " k"]) -> Float[Array, "D k"]:
    """Every device's k numbers, in the devices' order. A sum with zeros, which is exact and which the type system knows to be replicated."""
    all_numbers = jnp.zeros((jax.lax.axis_size(AXIS), *own.shape), own.dtype)
    return jax.lax.psum(all_numbers.at[jax.lax.axis_index(AXIS)].set(own), AXIS)


def on_every_device(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether it is true on all of them: of leaves in shares, each device has looked at its own."""
    return jax.lax.psum(1 - flag.astype(jnp.int32), AXIS) == 0


def sum_terms(terms_local: Terms) -> Terms:
    """Terms are sums over rows and add up; the loss is a mean over rows and is averaged. One collective for all."""
    total = jax.lax.psum(jnp.stack(terms_local), AXIS)
    return Terms(*total)._replace(loss=total[0] / jax.lax.axis_size(AXIS))


def mean_statistics(statistics_local: MovingStatistics) -> MovingStatistics:
    """Each device has moved the statistics by its own rows; their mean is what the whole batch would have given."""
    return jax.lax.pmean(statistics_local, AXIS)


def mean_unowned(unowned_local: Float[Array, ""]) -> Float[Array, ""]:
    """The whole batch's unowned share, for objective="global": reduced before the seki weight is made from it."""
    return jax.lax.pmean(unowned_local, AXIS)
