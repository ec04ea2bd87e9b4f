"""TrainState: everything that survives a step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import convert, optim
from .config import Config
from .loss import MovingStatistics
from .mesh import make_mesh, put_state
from .model import Net, init_net
from .optim import Moments


class Learned(eqx.Module):
    """The part of the state that lives on the devices; the step takes it and returns the next one."""

    net: Net
    opt_state: Moments  # in the state dtype
    ema: Net | None  # float32, where the run keeps one
    statistics: MovingStatistics  # of the seki weight


class TrainState(eqx.Module):
    """The whole state. The counts are host integers: a device's 32 bits end at two billion rows."""

    learned: Learned
    step: int  # optimizer steps taken
    samples: int  # rows trained on


def init_state(config: Config) -> TrainState:
    """The state before the first step, on the devices; the seed gives the original's numbers."""
    return TrainState(put_state(make_mesh(config), init_learned(config)), step=0, samples=0)


def init_learned(config: Config) -> Learned:
    net = init_net(jax.random.PRNGKey(config.seed), config.model, config.precision, config.init_std)
    return Learned(
        net=net,
        opt_state=optim.make_optimizer(config).init(net),
        ema=init_ema(net) if config.ema_decay > 0 else None,
        statistics=MovingStatistics(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)),
    )


def init_ema(net: Net) -> Net:
    return jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), net)


def learned_shapes(config: Config) -> Learned:
    """The shapes and dtypes of `Learned`, without the memory."""
    return jax.eval_shape(lambda: init_learned(config))


def to_host(state: TrainState) -> dict[str, np.ndarray]:
    """Every leaf as a host array under the original's names: `params/...`, `opt_state/m/...`, `ema_params/...`, counts."""
    learned = jax.device_get(state.learned)
    trees = {"params": learned.net, "opt_state/m": learned.opt_state.m, "opt_state/v": learned.opt_state.v}
    if learned.ema is not None:
        trees["ema_params"] = learned.ema
    flat = {f"{kind}/{name}": leaf for kind, tree in trees.items() for name, leaf in convert.to_named(tree).items()}
    return flat | {
        "moving_sum": learned.statistics.sum,
        "moving_weight": learned.statistics.weight,
        "step": np.int64(state.step),
        "samples": np.int64(state.samples),
    }
