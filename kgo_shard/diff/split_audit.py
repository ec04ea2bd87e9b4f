"""The collectives of a step whose state is split over the devices, each with its reason, foretold from the shapes of the leaves alone."""

import math
from collections import Counter
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import mesh, muon, shares
from ..config import Config
from ..loss import Terms
from ..model import matrices, net_shapes
from ..optim import rule_labels
from .collectives import Collective, describe, lowered_collectives
from .shard_side import lower_step
from .trace import Tape

SCATTER, GATHER = "mean of the gradients, to each device its share", "parameters for the step, whole"
FINITE, TERMS, STATISTICS, UNOWNED = "whether every share is finite", "sum of the loss terms", "mean of the moving statistics", "the batch's unowned share"
MUON = "Muon's matrices, to one device each and back"
NORM, NORM_SUMS = "leaves for the norm, to one device each", "the leaves' sums of squares"
SHORT = {"float32": "f32", "bfloat16": "bf16"}
COLUMNS = ("reason", "kind", "dtype", "elements", "foretold", "found", "bytes sent")


def foretell(config: Config) -> dict[str, Counter[Collective]]:
    """Reason -> the collectives that one step of a split state asks for, with that reason."""
    devices = mesh.make_mesh(config).size
    net = net_shapes(config.model, config.precision)
    dtype, compute = jnp.dtype(config.precision.param), jnp.dtype(config.precision.compute)
    found: dict[str, Counter[Collective]] = {reason: Counter() for reason in (SCATTER, GATHER, MUON, NORM, NORM_SUMS)}

    def add(reason, kind, dtype, elements, count=1):
        if kind == "all_to_all" and devices == 1:
            return  # JAX asks for none
        found.setdefault(reason, Counter())[Collective(kind, SHORT.get(str(dtype), str(dtype)), elements, devices)] += count

    leaves = list(zip(*map(jax.tree.leaves, (net, shares.num_layers(net), matrices(net), rule_labels(net, config))), strict=True))
    for leaf, layers, is_matrix, _ in leaves:
        n = layers * shares.share_size(leaf.size // layers, devices)
        add(SCATTER, "reduce_scatter", dtype, devices * n)
        add(GATHER, "all_gather", compute if is_matrix and compute.itemsize < dtype.itemsize else dtype, n)
    dealt = Counter()
    for leaf, layers, _, rule in leaves:
        if rule in (muon.BY_HEADS, muon.BY_ROWS):
            dealt[rule, leaf.shape[-2:]] += math.prod(leaf.shape[:-2])
    for (_, shape), count in dealt.items():
        add(MUON, "all_to_all", "bfloat16", devices * max(2, math.ceil(count / devices)) * shares.share_size(math.prod(shape), devices), count=2)
    if config.needs_grad_norm:
        shapes, sums = sorted((leaf.shape, layers) for leaf, layers, *_ in leaves), 0
        for (shape, layers), same in groupby(shapes):
            things = devices * math.ceil(len(list(same)) / devices)
            add(NORM, "all_to_all", dtype, things * layers * shares.share_size(math.prod(shape) // layers, devices))
            sums += things
        add(NORM_SUMS, "all_reduce", "float32", sums)
    add(TERMS, "all_reduce", "float32", len(Terms._fields))
    add(STATISTICS, "all_reduce", "float32", 1, count=2)
    if config.objective == "global":
        add(UNOWNED, "all_reduce", "float32", 1)
    add(FINITE, "all_reduce", "i32", 1)
    return found


def sent(collective: Collective) -> float:
    """Bytes that each device sends in a ring or, of an all-to-all, to the others: an all-reduce is a scatter and a gather of its operand."""
    whole = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": collective.devices, "all_to_all": 1}[collective.kind]
    return whole * collective.bytes * (collective.devices - 1) / collective.devices


def total_sent(collectives: Counter[Collective]) -> float:
    return sum(sent(collective) * count for collective, count in collectives.items())


class SplitAudit(NamedTuple):
    """What a split step was foretold to ask for, what it asks for, and what the replicated step does."""

    foretold: dict[str, Counter[Collective]]
    found: Counter[Collective]
    replicated: Counter[Collective]

    @property
    def expected(self) -> Counter[Collective]:
        return sum(self.foretold.values(), Counter())

    @property
    def explained(self) -> bool:
        return bool(self.found) and self.found == self.expected

    def verdict(self) -> str:
        if not self.explained:
            return f"UNEXPLAINED: {describe(self.found - self.expected)}; foretold but missing: {describe(self.expected - self.found)}"
        parameters = total_sent(self.foretold[SCATTER]) + total_sent(self.foretold[GATHER])
        return (
            f"EXPLAINED: {sum(self.found.values())} collectives; each device sends {total_sent(self.found):,.0f} bytes a step, of them "
            f"{parameters:,.0f} for gradients and parameters; the replicated step sends {total_sent(self.replicated):,.0f}"
        )

    def rows(self) -> list[list[str]]:
        return [
            [reason, c.kind, c.dtype, f"{c.elements:,}", str(count), str(self.found[c]), f"{sent(c) * count:,.0f}"]
            for reason, counter in self.foretold.items()
            for c, count in sorted(counter.items(), reverse=True)
        ] + [["UNEXPLAINED", c.kind, c.dtype, f"{c.elements:,}", "0", str(n), f"{sent(c) * n:,.0f}"] for c, n in (self.found - self.expected).items()]


def audit_split(tape: Tape) -> SplitAudit:
    """Of the lowered step for one batch."""
    lowered = [lowered_collectives(lower_step(tape._replace(options=tape.options | {"shard_state": kind})).as_text()) for kind in ("data", "none")]
    return SplitAudit(foretell(Config(**tape.options)), *lowered)


def section(found: SplitAudit) -> dict:
    return {
        "title": "Collectives of the step with split state",
        "text": "Foretold from the shapes of the leaves, and found in the lowered program; of one operand each.",
        "columns": list(COLUMNS),
        "rows": found.rows(),
        "verdict": found.verdict(),
        "image_png": None,
    }
