"""The single-device audit: which loss term makes D devices train on another objective than one device, and by how much."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import augment, convert, layout, loss, mesh, reduce
from ..config import Config
from ..loss import LOSS_WEIGHTS
from ..mesh import make_mesh
from ..model import make_tables
from ..state import TrainState
from ..step import Batch, first_batch, weigh_seki


class TermAudit(NamedTuple):
    """One loss term's gradient, as it enters the loss, on D devices and on one. Norms are over all parameters."""

    term: str
    share: float  # its gradient's norm over the whole gradient's, one device
    difference: float  # the norm of (D devices - one device) over the whole gradient's norm, one device


class Audit(NamedTuple):
    devices: int
    difference: float  # of the whole gradients, over the norm of the single device's
    terms: tuple[TermAudit, ...]  # largest difference first

    def verdict(self) -> str:
        worst = self.terms[0]
        others = np.sqrt(sum(term.difference**2 for term in self.terms[1:]))
        return (
            f"{self.devices} devices differ from one by {100 * self.difference:.2f} % of the gradient's norm; "
            f"{worst.term} alone makes {100 * worst.difference:.2f} %, all other terms together {others:.1e} (rounding)"
        )


def audit_objective(config: Config, batch: Batch, load) -> Audit:
    """Compare every term's gradient on the config's devices with the same batch's on one device.

    `load(config)` gives the state to differentiate at, for either device count.
    """
    alone = config.replace(data_parallel=False, data_parallel_devices=0)
    many, one = term_gradients(config, load(config), batch), term_gradients(alone, load(alone), batch)
    whole = norm(sum(one.values()))
    terms = [TermAudit(name, norm(one[name]) / whole, norm(many[name] - one[name]) / whole) for name in LOSS_WEIGHTS]
    terms.sort(key=lambda term: -term.difference)
    return Audit(make_mesh(config).size, norm(sum(many.values()) - sum(one.values())) / whole, tuple(terms))


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def term_gradients(config: Config, state: TrainState, batch: Batch) -> dict[str, np.ndarray]:
    """The reduced gradient of each term as it enters the loss (weight and division by rows included), flat float64."""
    tables = make_tables(config.model)

    def body(net, statistics, rows):
        batch_local = augment.expand(first_batch(rows), config.pos_len)
        seki_weight, _ = weigh_seki(statistics, batch_local, config)

        def weighted_terms(net_local):
            outputs = net_local(batch_local[layout.PLANES], batch_local[layout.GLOBALS], tables)
            terms = loss.compute_terms(outputs, batch_local, seki_weight, tables)
            rows_local = len(batch_local[layout.TARGETS])
            return jnp.stack([getattr(terms, name) * weight / rows_local for name, weight in LOSS_WEIGHTS.items()])

        # One pullback after another, and not jax.jacrev: with its batched cotangents the convolution's gradient comes out
        # wrong on JAX 0.10's CPU backend, and is not implemented on 0.7.
        _, pull_back = jax.vjp(weighted_terms, reduce.to_local(net))
        picks = reduce.to_local(jnp.eye(len(LOSS_WEIGHTS), dtype=jnp.float32))
        return reduce.mean_gradients(jax.lax.map(lambda pick: pull_back(pick)[0], picks))

    device_mesh = make_mesh(config)
    compiled = jax.jit(mesh.shard(body, device_mesh, inputs=("state", "state", "batch"), outputs="result"))
    learned = state.learned
    leaves = jax.device_get(convert.to_named(compiled(learned.net, learned.statistics, mesh.put_batches(device_mesh, [batch]))))
    flat = np.concatenate([np.asarray(leaf, np.float64).reshape(len(LOSS_WEIGHTS), -1) for leaf in leaves.values()], axis=1)
    return dict(zip(LOSS_WEIGHTS, flat, strict=True))
