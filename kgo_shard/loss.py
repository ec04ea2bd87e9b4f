"""The objective of one device's rows: one function a term, all named.

A term is a SUM over the rows it is given; only the total divides, by the number of rows (not by the sum of weights).
A constant multiplies the finished sum unless the function says otherwise. `sg` marks where a prediction only weighs
or targets another term and must not receive its gradient. Formulas are KataGo's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient as sg
from jaxtyping import Array, Float

from . import layout
from .layout import Column, ValuePlane
from .model import Outputs, Tables

SEKI_MOMENTUM = 0.998
SEKI_FLOOR = 0.005
SEKI_SCALE = 8 * SEKI_FLOOR
EVALUATION_SEKI_WEIGHT = 7.0


class Terms(NamedTuple):
    """The metric vector by name, in the original's order: float32 scalars, sums over rows except `loss`."""

    loss: Float[Array, ""]
    p0loss: Float[Array, ""]
    p1loss: Float[Array, ""]
    p0softloss: Float[Array, ""]
    p1softloss: Float[Array, ""]
    p0lopt: Float[Array, ""]
    p0sopt: Float[Array, ""]
    vloss: Float[Array, ""]
    tdvloss1: Float[Array, ""]
    tdvloss2: Float[Array, ""]
    tdvloss3: Float[Array, ""]
    tdsloss: Float[Array, ""]
    oloss: Float[Array, ""]
    sloss: Float[Array, ""]
    fploss: Float[Array, ""]
    skloss: Float[Array, ""]
    smloss: Float[Array, ""]
    sbcdfloss: Float[Array, ""]
    sbpdfloss: Float[Array, ""]
    sdregloss: Float[Array, ""]
    leadloss: Float[Array, ""]
    vtimeloss: Float[Array, ""]
    evstloss: Float[Array, ""]
    esstloss: Float[Array, ""]
    pacc1: Float[Array, ""]
    wsum: Float[Array, ""]


# How much of each term enters the loss, in the order in which they are added. The last two terms do not.
LOSS_WEIGHTS = {
    "p0loss": 0.93,
    "p1loss": 1.0,
    "p0softloss": 8.0,
    "p1softloss": 8.0,
    "p0lopt": 0.1,
    "p0sopt": 0.2,
    "vloss": 0.6,
    "tdvloss1": 0.6,
    "tdvloss2": 0.6,
    "tdvloss3": 0.6,
    "tdsloss": 1.0,
    "oloss": 1.0,
    "sloss": 0.25,
    "fploss": 1.0,
    "skloss": 1.0,
    "smloss": 1.0,
    "sbcdfloss": 1.0,
    "sbpdfloss": 1.0,
    "sdregloss": 1.0,
    "leadloss": 1.0,
    "vtimeloss": 1.0,
    "evstloss": 1.0,
    "esstloss": 1.0,
}


# What a loss profile leaves of the loss, to time its parts; the terms are computed all the same.
PROFILES = {"full": tuple(LOSS_WEIGHTS), "policy_value": ("p0loss", "vloss"), "policy_only": ("p0loss",), "value_only": ("vloss",)}


class MovingStatistics(NamedTuple):
    """Running sum and weight (float32 scalars) of the share of points that nobody owns; the seki weight's input."""

    sum: Float[Array, ""]
    weight: Float[Array, ""]


def unowned_share(batch: dict[str, Array]) -> Float[Array, ""]:
    """u: mean over the rows of the board's unowned share, weighted as ownership is. Linear in the rows."""
    ownership = batch[layout.VALUES][:, ValuePlane.ownership]
    area = ownership.shape[-1] * ownership.shape[-2]
    weight = batch[layout.TARGETS][:, Column.ownership_weight]
    return jnp.mean(jnp.sum(1 - ownership * ownership, axis=(1, 2)) / (1 + area) * weight)


def update_statistics(statistics: MovingStatistics, unowned: Float[Array, ""]) -> MovingStatistics:
    return MovingStatistics(SEKI_MOMENTUM * statistics.sum + unowned, SEKI_MOMENTUM * statistics.weight + 1)


def seki_weight(statistics: MovingStatistics) -> Float[Array, ""]:
    """k: the rarer unowned points are, the more a seki counts. Not linear: of one device's rows it is not the batch's."""
    return SEKI_SCALE / (SEKI_FLOOR + statistics.sum / statistics.weight)


def cross_entropy(logits: Array, target: Array, axis: int = -1) -> Array:
    return -jnp.sum(target * jax.nn.log_softmax(logits, axis=axis), axis=axis)


def huber(prediction: Array, target: Array, delta: float) -> Array:
    error = jnp.abs(prediction - target)
    quadratic = jnp.minimum(error, delta)
    return 0.5 * quadratic * quadratic + delta * (error - quadratic)


def soften(target: Array) -> Array:
    """(t + 1e-7)^0.25, renormalised."""
    soft = (target + 1e-7) ** 0.25
    return soft / jnp.sum(soft, axis=-1, keepdims=True)


class Targets(NamedTuple):
    """A batch's targets and row weights under their names; g weighs the row in every term."""

    columns: Float[Array, "b columns"]
    policy: Float[Array, "b A+1"]
    reply: Float[Array, "b A+1"]
    scores: Float[Array, "b S"]
    values: Float[Array, "b 5 P P"]

    @property
    def g(self) -> Float[Array, " b"]:
        return self.columns[:, Column.row_weight]

    def column(self, index) -> Array:
        return self.columns[:, index]


def make_targets(batch: dict[str, Array]) -> Targets:
    counts = batch[layout.POLICY]
    policy = counts / jnp.sum(counts, axis=-1, keepdims=True)
    return Targets(batch[layout.TARGETS], policy[:, 0], policy[:, 1], batch[layout.SCORES], batch[layout.VALUES])


class Predictions(NamedTuple):
    """Head outputs on the scales of their targets."""

    td_logits: tuple[Float[Array, "b 3"], ...]
    td_scores: Float[Array, "b 3"]
    score_mean: Float[Array, " b"]
    score_stdev: Float[Array, " b"]
    lead: Float[Array, " b"]
    variance_time: Float[Array, " b"]
    value_error: Float[Array, " b"]  # of the short-term value
    score_error: Float[Array, " b"]  # of the short-term score
    score_chances: Float[Array, "b S"]  # one array for all terms that use it: where cotangents meet decides last bits


def make_predictions(outputs: Outputs) -> Predictions:
    misc, more = outputs.misc, outputs.more_misc
    return Predictions(
        td_logits=(misc[:, 4:7], misc[:, 7:10], more[:, 2:5]),
        td_scores=20 * more[:, 5:8],
        score_mean=20 * misc[:, 0],
        score_stdev=20 * jax.nn.softplus(misc[:, 1]),
        lead=20 * misc[:, 2],
        variance_time=40 * jax.nn.softplus(misc[:, 3]),
        value_error=0.25 * jax.nn.softplus(more[:, 0] / 2) ** 2,
        score_error=150 * jax.nn.softplus(more[:, 1] / 2) ** 2,
        score_chances=jnp.exp(outputs.score_belief),
    )


def policy_loss(policy, t: Targets):
    return jnp.sum(t.g * t.column(Column.policy_weight) * cross_entropy(policy, t.policy))


def reply_loss(policy, t: Targets):
    return 0.15 * jnp.sum(t.g * t.column(Column.reply_weight) * cross_entropy(policy, t.reply))


def soft_policy_loss(policy, t: Targets):
    return jnp.sum(t.g * t.column(Column.policy_weight) * cross_entropy(policy, soften(t.policy)))


def soft_reply_loss(policy, t: Targets):
    return 0.15 * jnp.sum(t.g * t.column(Column.reply_weight) * cross_entropy(policy, soften(t.reply)))


def long_term_optimism_loss(policy, p: Predictions, t: Targets):
    """Policy of games that went better than predicted at their end."""
    win = t.column(0) + 0.5 * t.column(2)
    z = (t.column(Column.score_mean) - sg(p.score_mean)) / jnp.sqrt(sg(p.score_stdev) ** 2 + 0.25)
    weight = jnp.clip(win**2 + jax.nn.sigmoid(3 * (z - 1.5)), 0, 1)
    weight = weight * t.column(Column.policy_weight) * t.column(Column.ownership_weight)
    return jnp.sum(t.g * weight * cross_entropy(policy, t.policy))


def short_term_optimism_loss(policy, p: Predictions, t: Targets):
    """Policy of positions that went better than predicted soon after."""
    value_surprise = short_term_result(t) - sg(short_term_value(p))
    value_z = value_surprise / jnp.sqrt(sg(p.value_error) + 1e-4)
    score_surprise = t.column(Column.short_term_score) - sg(p.td_scores[:, 2])
    score_z = score_surprise / jnp.sqrt(sg(p.score_error) + 0.25)
    weight = jnp.clip(jax.nn.sigmoid(3 * (value_z - 1.5)) + jax.nn.sigmoid(3 * (score_z - 1.5)), 0, 1)
    weight = weight * t.column(Column.policy_weight) * t.column(Column.ownership_weight)
    return jnp.sum(t.g * weight * cross_entropy(policy, t.policy))


def short_term_result(t: Targets) -> Float[Array, " b"]:
    return t.column(Column.short_term_win) - t.column(Column.short_term_loss)


def short_term_value(p: Predictions) -> Float[Array, " b"]:
    chances = jax.nn.softmax(p.td_logits[2], axis=-1)
    return chances[:, 0] - chances[:, 1]


def value_loss(outputs: Outputs, t: Targets):
    weight = 1 - t.column(Column.value_weight_off)
    return 1.20 * jnp.sum(t.g * weight * cross_entropy(outputs.value, t.column(Column.value)))


def td_value_losses(p: Predictions, t: Targets) -> tuple[Array, ...]:
    """Cross-entropies less the targets' own entropies; here 1.20 multiplies every row."""
    logits = jnp.stack(p.td_logits, axis=1)
    target = jnp.stack([t.column(columns) for columns in Column.td_values], axis=1)
    excess = cross_entropy(logits, target) - cross_entropy(jnp.log(target + 1e-30), target)
    weight = 1.20 * t.g * (1 - t.column(Column.td_weight_off))
    return tuple(jnp.sum(weight * excess[:, i]) for i in range(3))


def td_score_loss(p: Predictions, t: Targets):
    target = jnp.stack([t.column(column) for column in Column.td_scores], axis=1)
    return 0.0004 * jnp.sum(t.g * t.column(Column.ownership_weight) * jnp.sum(huber(p.td_scores, target, 12.0), axis=1))


def ownership_loss(outputs: Outputs, t: Targets):
    prediction = outputs.ownership.reshape(len(t.g), -1)
    target = t.values[:, ValuePlane.ownership].reshape(prediction.shape)
    area = prediction.shape[-1]
    ce = cross_entropy(jnp.stack([prediction, -prediction], axis=-1), jnp.stack([(1 + target) / 2, (1 - target) / 2], axis=-1))
    return 1.5 * jnp.sum(t.g * t.column(Column.ownership_weight) * (jnp.sum(ce, axis=-1) / area))


def scoring_loss(outputs: Outputs, t: Targets):
    difference = outputs.scoring[:, 0] - t.values[:, ValuePlane.scoring] / 120
    mean_square = jnp.mean(difference * difference, axis=(1, 2))
    return 4 * jnp.sum(t.g * t.column(Column.scoring_weight) * (jnp.sqrt(0.5 * mean_square + 1) - 1))


def future_loss(outputs: Outputs, t: Targets):
    difference = jnp.tanh(outputs.future) - t.values[:, ValuePlane.future]
    weighted = difference * difference * jnp.array([1.0, 0.25], jnp.float32)[:, None, None]
    area = outputs.future.shape[-1] * outputs.future.shape[-2]
    return 0.25 * jnp.sum(t.g * t.column(Column.future_weight) * (jnp.sum(weighted, axis=(1, 2, 3)) / area**0.5))


def seki_loss(outputs: Outputs, t: Targets, k):
    """Who lives in seki (three classes), and what stays unowned (two); k is their weight."""
    area = outputs.seki.shape[-1] * outputs.seki.shape[-2]
    seki, ownership = t.values[:, ValuePlane.seki], t.values[:, ValuePlane.ownership]
    # The classes stay on axis 1, as the original has them: on the last axis the sums over them round otherwise, if rarely.
    life = jnp.stack([1 - seki * seki, jax.nn.relu(seki), jax.nn.relu(-seki)], axis=1)
    life_loss = jnp.sum(cross_entropy(outputs.seki[:, :3], life, axis=1), axis=(1, 2))
    unowned = jnp.stack([1 - ownership * ownership, ownership * ownership], axis=1)
    unowned_logits = jnp.stack([outputs.seki[:, 3], jnp.zeros_like(outputs.seki[:, 3])], axis=1)
    unowned_loss = jnp.sum(cross_entropy(unowned_logits, unowned, axis=1), axis=(1, 2))
    both = life_loss + 0.5 * unowned_loss
    return jnp.sum(((t.g * k * t.column(Column.ownership_weight)) * both) / area)


def score_mean_loss(p: Predictions, t: Targets):
    error = huber(p.score_mean, t.column(Column.score_mean), 12.0)
    return 0.0015 * jnp.sum(t.g * t.column(Column.ownership_weight) * error)


def score_cdf_loss(p: Predictions, t: Targets):
    difference = jnp.cumsum(p.score_chances, axis=-1) - jnp.cumsum(t.scores / 100, axis=-1)
    return 0.020 * jnp.sum(t.g * t.column(Column.ownership_weight) * jnp.sum(difference * difference, axis=-1))


def score_pdf_loss(outputs: Outputs, t: Targets):
    ce = -jnp.sum(t.scores / 100 * outputs.score_belief, axis=-1)
    return 0.020 * jnp.sum(t.g * t.column(Column.ownership_weight) * ce)


def score_stdev_loss(p: Predictions, t: Targets, score_offsets):
    """The predicted standard deviation against that of the predicted distribution."""
    mean = jnp.sum(p.score_chances * score_offsets, axis=-1, keepdims=True)
    variance = jnp.sum(p.score_chances * (score_offsets - mean) ** 2, axis=-1)
    return 0.001 * jnp.sum(t.g * huber(p.score_stdev, jnp.sqrt(0.001 + variance), 10.0))


def lead_loss(p: Predictions, t: Targets):
    return 0.0060 * jnp.sum(t.g * t.column(Column.lead_weight) * huber(p.lead, t.column(Column.lead), 8.0))


def variance_time_loss(p: Predictions, t: Targets):
    error = huber(p.variance_time, t.column(Column.variance_time) + 1e-5, 50.0)
    return 0.0003 * jnp.sum(t.g * t.column(Column.ownership_weight) * error)


def value_error_loss(p: Predictions, t: Targets):
    real = sg(short_term_value(p) - short_term_result(t))
    error = huber(p.value_error, real * real + 1e-8, 0.4)
    return 2.0 * jnp.sum(t.g * t.column(Column.ownership_weight) * error)


def score_error_loss(p: Predictions, t: Targets):
    real = sg(p.td_scores[:, 2] - t.column(Column.short_term_score))
    error = huber(p.score_error, real * real + 1e-4, 100.0)
    return 0.00002 * jnp.sum(t.g * t.column(Column.ownership_weight) * error)


def policy_accuracy(policy, t: Targets):
    hit = jnp.argmax(policy, axis=-1) == jnp.argmax(t.policy, axis=-1)
    return jnp.sum(t.g * t.column(Column.policy_weight) * hit.astype(jnp.float32))


def compute_terms(outputs: Outputs, batch: dict[str, Array], k: Float[Array, ""], tables: Tables, profile: str = "full") -> Terms:
    """Every term over the given rows, and the loss: the weighted sum of the profile's terms over the number of rows."""
    t, p = make_targets(batch), make_predictions(outputs)
    policy = outputs.policy
    td1, td2, td3 = td_value_losses(p, t)
    terms = dict(
        p0loss=policy_loss(policy[:, 0], t),
        p1loss=reply_loss(policy[:, 1], t),
        p0softloss=soft_policy_loss(policy[:, 2], t),
        p1softloss=soft_reply_loss(policy[:, 3], t),
        p0lopt=long_term_optimism_loss(policy[:, 4], p, t),
        p0sopt=short_term_optimism_loss(policy[:, 5], p, t),
        vloss=value_loss(outputs, t),
        tdvloss1=td1,
        tdvloss2=td2,
        tdvloss3=td3,
        tdsloss=td_score_loss(p, t),
        oloss=ownership_loss(outputs, t),
        sloss=scoring_loss(outputs, t),
        fploss=future_loss(outputs, t),
        skloss=seki_loss(outputs, t, k),
        smloss=score_mean_loss(p, t),
        sbcdfloss=score_cdf_loss(p, t),
        sbpdfloss=score_pdf_loss(outputs, t),
        sdregloss=score_stdev_loss(p, t, tables.score_offsets),
        leadloss=lead_loss(p, t),
        vtimeloss=variance_time_loss(p, t),
        evstloss=value_error_loss(p, t),
        esstloss=score_error_loss(p, t),
        pacc1=policy_accuracy(policy[:, 0], t),
        wsum=jnp.sum(t.g),
    )
    total = 0.0
    for name in PROFILES[profile]:
        weight = LOSS_WEIGHTS[name]
        total = total + (terms[name] if weight == 1.0 else weight * terms[name])
    return Terms(loss=total / len(t.g), **terms)
