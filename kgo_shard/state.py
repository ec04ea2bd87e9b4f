"""TrainState: everything that survives a step."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import convert, mesh, optim, shares
from .config import Config
from .loss import MovingStatistics
from .mesh import make_mesh
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
    return TrainState(place(init_learned(config), config), step=0, samples=0)


def place(learned: Learned, config: Config) -> Learned:
    """A whole state on the devices, as the run keeps it there."""
    device_mesh = make_mesh(config)
    if config.splits_state:
        learned = map_nets(lambda net: shares.cut_net(net, device_mesh.size), learned)
    return mesh.put(device_mesh, learned, mesh.state_kind(config))


def map_nets(change: Callable[[Net], Net], learned: Learned) -> Learned:
    """Every net-shaped tree of the state changed; the statistics are not."""
    ema = None if learned.ema is None else change(learned.ema)
    return Learned(change(learned.net), Moments(*map(change, learned.opt_state)), ema, learned.statistics)


def init_learned(config: Config) -> Learned:
    net = init_net(jax.random.PRNGKey(config.seed), config.model, config.precision, config.init_std)
    return Learned(
        net=jax.tree.map(lambda p: p.astype(config.precision.master), net),
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
    learned = map_nets(shares.join_net, jax.device_get(state.learned))  # shares too are joined on the host, which holds one copy
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
