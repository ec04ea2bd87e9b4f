"""Every collective of the step, each with its reason. Only these functions take the suffix `_local` off a value.

Inside `shard_map` with `check_vma=True` the type of a value says whether it varies over the mesh axis. Parameters come
in unvarying; `to_local` makes them varying before they are differentiated, because the gradient with respect to an
unvarying value is already summed over the axis: a mean taken after that would be D times too large.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .loss import MovingStatistics, Terms
from .mesh import AXIS


def to_local(tree):
    """The same values, typed as varying over the devices: what is computed from them is each device's own."""
    if hasattr(jax.lax, "pcast"):
        return jax.tree.map(lambda x: jax.lax.pcast(x, AXIS, to="varying"), tree)
    return jax.tree.map(lambda x: jax.lax.pvary(x, AXIS), tree)  # JAX 0.7 and 0.8


def mean_gradients(gradients_local):
    """Mean over the devices of each device's gradient, in the gradient's dtype.

    The loss divides by the device's own rows, so with equal shards the mean of gradients is that of the mean loss.
    """
    return jax.lax.pmean(gradients_local, AXIS)


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
