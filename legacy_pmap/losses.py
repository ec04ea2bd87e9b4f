"""The objective on one replica's rows: 23 terms, 26 metrics, the seki weight's moving statistic (spec, section 3).

Every term is a SUM over rows; a leading constant multiplies the finished sum, except where the spec says otherwise.
"""

import jax
import jax.numpy as jnp

from .config import dtypes_of
from .model import forward

METRICS = ("loss", "p0loss", "p1loss", "p0softloss", "p1softloss", "p0lopt", "p0sopt", "vloss", "tdvloss1", "tdvloss2", "tdvloss3",
           "tdsloss", "oloss", "sloss", "fploss", "skloss", "smloss", "sbcdfloss", "sbpdfloss", "sdregloss", "leadloss", "vtimeloss",
           "evstloss", "esstloss", "pacc1", "wsum")

# The weights of the terms in the loss, added left to right in this order.
TERM_WEIGHTS = {"p0loss": 0.93, "p1loss": 1.0, "p0softloss": 8.0, "p1softloss": 8.0, "p0lopt": 0.1, "p0sopt": 0.2, "vloss": 0.6,
                "tdvloss1": 0.6, "tdvloss2": 0.6, "tdvloss3": 0.6, "tdsloss": 1.0, "oloss": 1.0, "sloss": 0.25, "fploss": 1.0,
                "skloss": 1.0, "smloss": 1.0, "sbcdfloss": 1.0, "sbpdfloss": 1.0, "sdregloss": 1.0, "leadloss": 1.0,
                "vtimeloss": 1.0, "evstloss": 1.0, "esstloss": 1.0}

# What --loss-profile leaves of it, for profiling; the metrics stay all 26.
PROFILE_TERMS = {"full": tuple(TERM_WEIGHTS), "policy_value": ("p0loss", "vloss"), "policy_only": ("p0loss",), "value_only": ("vloss",)}

MOVING_DECAY = 0.998
SEKI_FLOOR = 0.005
SEKI_EVAL_WEIGHT = 7.0

stop = jax.lax.stop_gradient


def cross_entropy(logits, target, axis=-1):
    return -jnp.sum(target * jax.nn.log_softmax(logits, axis=axis), axis=axis)


def huber(prediction, target, delta):
    error = jnp.abs(prediction - target)
    quadratic = jnp.minimum(error, delta)
    return 0.5 * quadratic * quadratic + delta * (error - quadratic)


def softened(target):
    """(t + 1e-7)^0.25, renormalised."""
    soft = jnp.power(target + 1e-7, 0.25)
    return soft / jnp.sum(soft, axis=-1, keepdims=True)


def seki_statistic(ownership_target, ownership_weight, area):
    """u: the mean over THIS replica's rows of the weighted unowned share of the board."""
    unowned = jnp.sum(1.0 - ownership_target * ownership_target, axis=(1, 2)) / (1.0 + area)
    return jnp.mean(unowned * ownership_weight)


def objective(params, batch, moving_sum, moving_weight, tables, config, training):
    """The local loss, for jax.grad with has_aux.

    Arguments: params; batch of N local rows (section 1's keys); the two moving scalars; the tables; training: whether the seki
    weight follows the moving statistic (evaluation: 7, statistics unchanged).
    Returns: (loss, (metrics (26,) in METRICS order with loss first, new moving sum, new moving weight)), all in the full dtype.
    An all-zero policy row makes everything NaN, as in the original (spec, 7.5).
    """
    batch = {key: array.astype(dtypes_of(config).full) for key, array in batch.items()}
    return heads_objective(forward(params, batch, tables, config), batch, moving_sum, moving_weight, tables, config, training)


def heads_objective(out, batch, moving_sum, moving_weight, tables, config, training):
    """`objective` from the head outputs `out` on; the batch in the full dtype."""
    full, area, size = dtypes_of(config).full, config.board_area, config.pos_len
    columns, board = batch["globalTargetsNC"], batch["valueTargetsNCHW"]
    rows = columns.shape[0]

    # Row weights.
    weight = columns[:, 25]
    policy_weight, ownership_weight, reply_weight = columns[:, 26], columns[:, 27], columns[:, 28]
    lead_weight, future_weight, scoring_weight = columns[:, 29], columns[:, 33], columns[:, 34]
    td_weight, value_weight = 1.0 - columns[:, 24], 1.0 - columns[:, 35]

    # Targets.
    visits = batch["policyTargetsNCMove"]
    target0 = visits[:, 0] / jnp.sum(visits[:, 0], axis=-1, keepdims=True)
    target1 = visits[:, 1] / jnp.sum(visits[:, 1], axis=-1, keepdims=True)
    soft0, soft1 = softened(target0), softened(target1)
    value_target = columns[:, 0:3]
    td_value_target = jnp.stack([columns[:, 4:7], columns[:, 8:11], columns[:, 12:15]], axis=1)
    td_score_target = jnp.stack([columns[:, 7], columns[:, 11], columns[:, 15]], axis=1)
    score_target = columns[:, 3]
    ownership_target, seki_target = board[:, 0], board[:, 1]
    future_target, scoring_target = board[:, 2:4], board[:, 4] / 120.0
    distribution = batch["scoreDistrN"] / 100.0

    # Predictions.
    policy, misc, moremisc = out["policy"], out["misc"], out["moremisc"]
    td_logits = jnp.stack([misc[:, 4:7], misc[:, 7:10], moremisc[:, 2:5]], axis=1)
    td_score = 20.0 * moremisc[:, 5:8]
    score_mean = 20.0 * misc[:, 0]
    score_stdev = 20.0 * jax.nn.softplus(misc[:, 1])
    lead = 20.0 * misc[:, 2]
    variance_time = 40.0 * jax.nn.softplus(misc[:, 3])
    value_error = 0.25 * jnp.square(jax.nn.softplus(moremisc[:, 0] * 0.5))
    score_error = 150.0 * jnp.square(jax.nn.softplus(moremisc[:, 1] * 0.5))
    td3 = jax.nn.softmax(td_logits[:, 2], axis=-1)
    td3_value = stop(td3[:, 0] - td3[:, 1])
    td3_target = columns[:, 12] - columns[:, 13]
    td3_score = stop(td_score[:, 2])

    term = {}

    def summed(*factors):
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
        return jnp.sum(product)

    # Policies.
    term["p0loss"] = summed(weight, policy_weight, cross_entropy(policy[:, 0], target0))
    term["p1loss"] = 0.15 * summed(weight, reply_weight, cross_entropy(policy[:, 1], target1))
    term["p0softloss"] = summed(weight, policy_weight, cross_entropy(policy[:, 2], soft0))
    term["p1softloss"] = 0.15 * summed(weight, reply_weight, cross_entropy(policy[:, 3], soft1))

    # Optimistic policies: only positions that went better than predicted.
    win2 = jnp.square(columns[:, 0] + 0.5 * columns[:, 2])
    z_long = (score_target - stop(score_mean)) / jnp.sqrt(jnp.square(stop(score_stdev)) + 0.25)
    long = jnp.clip(win2 + jax.nn.sigmoid(3.0 * (z_long - 1.5)), 0.0, 1.0) * policy_weight * ownership_weight
    term["p0lopt"] = summed(weight, long, cross_entropy(policy[:, 4], target0))
    z_value = (td3_target - td3_value) / jnp.sqrt(stop(value_error) + 1e-4)
    z_score = (columns[:, 15] - td3_score) / jnp.sqrt(stop(score_error) + 0.25)
    short = jnp.clip(jax.nn.sigmoid(3.0 * (z_value - 1.5)) + jax.nn.sigmoid(3.0 * (z_score - 1.5)), 0.0, 1.0)
    short = short * policy_weight * ownership_weight
    term["p0sopt"] = summed(weight, short, cross_entropy(policy[:, 5], target0))

    # Values.
    term["vloss"] = 1.20 * summed(weight, value_weight, cross_entropy(out["value"], value_target))
    td_value = cross_entropy(td_logits, td_value_target) - cross_entropy(jnp.log(td_value_target + 1e-30), td_value_target)
    for i in range(3):
        term[f"tdvloss{i + 1}"] = summed(1.20 * weight * td_weight, td_value[:, i])  # here 1.20 multiplies per row
    term["tdsloss"] = 0.0004 * summed(weight, ownership_weight, jnp.sum(huber(td_score, td_score_target, 12.0), axis=-1))

    # Boards.
    owner, owner_target = out["ownership"].reshape(rows, area), ownership_target.reshape(rows, area)
    owner_logits = jnp.stack([owner, -owner], axis=-1)
    owner_targets = jnp.stack([(1.0 + owner_target) / 2.0, (1.0 - owner_target) / 2.0], axis=-1)
    term["oloss"] = 1.5 * summed(weight, ownership_weight, jnp.sum(cross_entropy(owner_logits, owner_targets), axis=-1) / area)
    scoring = jnp.mean(jnp.square(out["scoring"][:, 0] - scoring_target), axis=(1, 2))
    term["sloss"] = 4.0 * summed(weight, scoring_weight, jnp.sqrt(0.5 * scoring + 1.0) - 1.0)
    future_scale = jnp.asarray([1.0, 0.25], full)[None, :, None, None]
    future = jnp.sum(jnp.square(jnp.tanh(out["futurepos"]) - future_target) * future_scale, axis=(1, 2, 3))
    term["fploss"] = 0.25 * summed(weight, future_weight, future / float(size))  # sqrt(A) = P
    unowned = seki_statistic(ownership_target, ownership_weight, area)
    if training:
        # Each replica's own statistic, before any pmean: with D > 1 this is not a whole batch's objective (spec, 7.1).
        moving_sum = MOVING_DECAY * moving_sum + unowned
        moving_weight = MOVING_DECAY * moving_weight + 1.0
        seki_weight = 8.0 * SEKI_FLOOR / (SEKI_FLOOR + moving_sum / moving_weight)
    else:
        seki_weight = SEKI_EVAL_WEIGHT
    seki, owned = out["seki"], jnp.square(ownership_target)
    sign_targets = jnp.stack([1.0 - jnp.square(seki_target), jax.nn.relu(seki_target), jax.nn.relu(-seki_target)], axis=1)
    sign = jnp.sum(cross_entropy(seki[:, 0:3], sign_targets, axis=1), axis=(1, 2))
    neutral_logits = jnp.stack([seki[:, 3], jnp.zeros_like(seki[:, 3])], axis=1)
    neutral = jnp.sum(cross_entropy(neutral_logits, jnp.stack([1.0 - owned, owned], axis=1), axis=1), axis=(1, 2))
    term["skloss"] = jnp.sum(((weight * seki_weight * ownership_weight) * (sign + 0.5 * neutral)) / area)

    # Scores.
    term["smloss"] = 0.0015 * summed(weight, ownership_weight, huber(score_mean, score_target, 12.0))
    belief_log = out["scorebelief"]
    belief = jnp.exp(belief_log)
    steps_apart = jnp.cumsum(belief, axis=-1) - jnp.cumsum(distribution, axis=-1)
    term["sbcdfloss"] = 0.020 * summed(weight, ownership_weight, jnp.sum(jnp.square(steps_apart), axis=-1))
    term["sbpdfloss"] = 0.020 * summed(weight, ownership_weight, -jnp.sum(distribution * belief_log, axis=-1))
    offsets = tables.score_offsets[None, :]
    belief_mean = jnp.sum(belief * offsets, axis=-1, keepdims=True)
    belief_variance = jnp.sum(belief * jnp.square(offsets - belief_mean), axis=-1)
    term["sdregloss"] = 0.001 * summed(weight, huber(score_stdev, jnp.sqrt(0.001 + belief_variance), 10.0))
    term["leadloss"] = 0.0060 * summed(weight, lead_weight, huber(lead, columns[:, 21], 8.0))
    term["vtimeloss"] = 0.0003 * summed(weight, ownership_weight, huber(variance_time, columns[:, 22] + 1e-5, 50.0))

    # How wrong the short-term predictions were.
    value_miss = stop(jnp.square(td3_value - td3_target)) + 1e-8
    score_miss = stop(jnp.square(td3_score - columns[:, 15])) + 1e-4
    term["evstloss"] = 2.0 * summed(weight, ownership_weight, huber(value_error, value_miss, 0.4))
    term["esstloss"] = 0.00002 * summed(weight, ownership_weight, huber(score_error, score_miss, 100.0))

    hit = (jnp.argmax(policy[:, 0], axis=-1) == jnp.argmax(target0, axis=-1)).astype(full)
    total = None
    for name in PROFILE_TERMS[config.loss_profile]:
        scale = TERM_WEIGHTS[name]
        part = term[name] if scale == 1.0 else scale * term[name]
        total = part if total is None else total + part
    term["loss"] = total / rows  # positions, not weights; the LOCAL number of rows
    term["pacc1"] = summed(weight, policy_weight, hit)
    term["wsum"] = jnp.sum(weight)
    metrics = jnp.stack([term[name] for name in METRICS])
    return term["loss"], (metrics, moving_sum, moving_weight)
