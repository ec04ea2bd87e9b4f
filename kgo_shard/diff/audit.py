"""The single-device audit: which loss term makes D devices train on another objective than one device, and by how much."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import augment, convert, layout, loss, mesh, reduce
from ..config import Config
from ..loss import LOSS_WEIGHTS, MovingStatistics
from ..mesh import make_mesh
from ..model import make_tables
from ..state import TrainState
from ..step import Batch, first_batch, weigh_seki
from .limits import limit_for


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
    many, one = make_term_gradients(config)(load(config), batch), make_term_gradients(alone)(load(alone), batch)
    return compare_terms(many, one, make_mesh(config).size)


class Ledger(NamedTuple):
    """The audit at a cold start and with warm statistics, as the original trains and with objective="global"."""

    audits: dict[str, Audit]  # "cold", "warm", "global, cold", "global, warm"

    @property
    def floor(self) -> float:
        """Rounding: the largest difference of a term where both sides compute the same gradient, objective="global"."""
        return max(term.difference for name, audit in self.audits.items() if name.startswith("global") for term in audit.terms)

    def differs(self, name: str) -> list[str]:
        """The terms of one audit that are further apart than rounding."""
        return [term.term for term in self.audits[name].terms if term.difference > limit_for(self.floor)]

    def rows(self) -> list[list[str]]:
        by_name = {name: {term.term: term for term in audit.terms} for name, audit in self.audits.items()}
        rows = []
        for term in LOSS_WEIGHTS:
            apart = [name for name in self.audits if term in self.differs(name)]
            why = f"DIFFERENT: {', '.join(apart)}: its weight comes from each device's own rows" if apart else "equal"
            found = [by_name[name][term] for name in self.audits]
            rows.append([term, f"{found[0].share:.2g}", *(f"{one.difference:.1e}" for one in found), why])
        return rows

    def verdict(self) -> str:
        apart = sorted({term for name in self.audits for term in self.differs(name)})
        equal = len(LOSS_WEIGHTS) - len(apart)
        return f"{equal} of {len(LOSS_WEIGHTS)} terms have the whole batch's gradient; {', '.join(apart) or 'none'} not (rounding: {self.floor:.0e})"


def ledger_section(found: Ledger) -> dict:
    devices = next(iter(found.audits.values())).devices
    return {
        "title": "Objective ledger",
        "text": f"The gradient of every loss term on {devices} devices and on one, at the same parameters and rows: norm of the difference "
        "over the norm of the whole gradient. Cold: moving statistics at zero; warm: after a long run.",
        "columns": ["loss term", "norm / whole gradient", *found.audits, "verdict"],
        "rows": found.rows(),
        "verdict": found.verdict(),
        "image_png": None,
    }


# A long run's: the decay 0.998 forgets after 500 steps. Host numbers, for JAX must not start at import.
WARM = MovingStatistics(np.float32(10.0), np.float32(500.0))


def objective_ledger(config: Config, batch: Batch, load) -> Ledger:
    """Every loss term: is its gradient on D devices the whole batch's, and if not, by how much?"""
    alone = config.replace(data_parallel=False, data_parallel_devices=0)
    compiled = {objective: make_term_gradients(config.replace(objective=objective)) for objective in ("replica", "global")}
    gradients_alone, many, one = make_term_gradients(alone), load(config), load(alone)
    audits = {}
    for objective, prefix in (("replica", ""), ("global", "global, ")):
        for heat in ("cold", "warm"):
            states = [state if heat == "cold" else warmed(state, c) for state, c in ((many, config), (one, alone))]
            gradients = compiled[objective](states[0], batch), gradients_alone(states[1], batch)
            audits[prefix + heat] = compare_terms(*gradients, make_mesh(config).size)
    return Ledger(audits)


def warmed(state: TrainState, config: Config) -> TrainState:
    statistics = mesh.put_state(make_mesh(config), WARM)
    return dataclasses.replace(state, learned=dataclasses.replace(state.learned, statistics=statistics))


def compare_terms(many: dict[str, np.ndarray], one: dict[str, np.ndarray], devices: int) -> Audit:
    whole = norm(sum(one.values()))
    terms = [TermAudit(name, norm(one[name]) / whole, norm(many[name] - one[name]) / whole) for name in LOSS_WEIGHTS]
    terms.sort(key=lambda term: -term.difference)
    return Audit(devices, norm(sum(many.values()) - sum(one.values())) / whole, tuple(terms))


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def make_term_gradients(config: Config) -> Callable[[TrainState, Batch], dict[str, np.ndarray]]:
    """gradients(state, batch): the reduced gradient of each term as it enters the loss (weight and division by rows), flat float64."""
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

    def gradients(state, batch):
        learned = state.learned
        leaves = jax.device_get(convert.to_named(compiled(learned.net, learned.statistics, mesh.put_batches(device_mesh, [batch]))))
        flat = np.concatenate([np.asarray(leaf, np.float64).reshape(len(LOSS_WEIGHTS), -1) for leaf in leaves.values()], axis=1)
        return dict(zip(LOSS_WEIGHTS, flat, strict=True))

    return gradients
