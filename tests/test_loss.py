"""The objective: every term derived anew in float64 from the specification's table, with a running bound of float32's error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kgo_shard import loss
from kgo_shard.augment import expand
from kgo_shard.batches import read_packed_batches
from kgo_shard.config import Config, ModelConfig
from kgo_shard.loss import MovingStatistics, Terms
from kgo_shard.mesh import make_mesh, put_batches, shard
from kgo_shard.model import Outputs, make_tables
from kgo_shard.reduce import sum_terms

# The specification's metric vector, in its order.
METRICS = (
    "loss p0loss p1loss p0softloss p1softloss p0lopt p0sopt vloss tdvloss1 tdvloss2 tdvloss3 tdsloss oloss sloss fploss skloss smloss"
    " sbcdfloss sbpdfloss sdregloss leadloss vtimeloss evstloss esstloss pacc1 wsum"
).split()
# loss = (0.93 p0loss + p1loss + 8 p0softloss + ...) / N
WEIGHTS = (0.93, 1, 8, 8, 0.1, 0.2, 0.6, 0.6, 0.6, 0.6, 1, 1, 0.25, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)

UNIT = 2.0**-24  # one rounding to float32: half a unit in the last place
TINY = 2.0**-126  # below it the compiler's functions may return zero
# XLA's exp, log, tanh and their like are good to a few units in the last place on a CPU; 8 of them, 16 roundings, is generous.
FUNCTION = 16 * UNIT


class Rounded:
    """A float64 value and a bound of the error of its evaluation in float32, in any order of summation.

    A running error analysis (Higham, section 3.3): operations pass on the errors of their operands, and add one rounding
    of their own; a sum of n terms adds n roundings of the sum of their sizes.
    """

    __array_ufunc__ = None  # so that NumPy leaves `array * rounded` to us

    def __init__(self, value, error=0.0):
        self.value = np.asarray(value, np.float64)
        self.error = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)

    @staticmethod
    def of(x):
        return x if isinstance(x, Rounded) else Rounded(x, np.abs(np.float64(np.float32(x)) - x) if np.ndim(x) == 0 else 0.0)

    @classmethod
    def computed(cls, value, inherited, own=UNIT):
        return cls(value, inherited + own * (np.abs(value) + inherited) + TINY)

    def __add__(self, other):
        other = Rounded.of(other)
        return Rounded.computed(self.value + other.value, self.error + other.error)

    def __sub__(self, other):
        return self + -Rounded.of(other)

    def __rsub__(self, other):
        return Rounded.of(other) - self

    def __neg__(self):
        return Rounded(-self.value, self.error)

    def __mul__(self, other):
        other = Rounded.of(other)
        inherited = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return Rounded.computed(self.value * other.value, inherited)

    def __truediv__(self, other):
        other = Rounded.of(other)
        quotient = self.value / other.value
        left = np.abs(other.value) - other.error
        assert (left > 0).all(), "a divisor that may be zero"
        return Rounded.computed(quotient, (self.error + np.abs(quotient) * other.error) / left)

    __radd__, __rmul__ = __add__, __mul__

    def __rtruediv__(self, other):
        return Rounded.of(other) / self

    def __getitem__(self, index):
        return Rounded(self.value[index], self.error[index])

    def monotone(self, function, own=FUNCTION, absolute=0.0):
        value = function(self.value)
        low, high = function(self.value - self.error), function(self.value + self.error)
        inherited = np.maximum(np.abs(high - value), np.abs(value - low))
        return Rounded.computed(value, inherited + absolute, own)

    def sum(self, axis=-1):
        count = np.prod([self.value.shape[a] for a in np.atleast_1d(axis)])
        sizes = (np.abs(self.value) + self.error).sum(axis)
        return Rounded(self.value.sum(axis), self.error.sum(axis) + count * UNIT * sizes)

    def cumsum(self):
        count = np.arange(1, self.value.shape[-1] + 1)
        sizes = np.cumsum(np.abs(self.value) + self.error, -1)
        return Rounded(np.cumsum(self.value, -1), np.cumsum(self.error, -1) + count * UNIT * sizes)


def exp(x):
    return x.monotone(np.exp)


def log(x):
    return x.monotone(lambda v: np.log(np.maximum(v, 1e-300)))


def sqrt(x):
    return x.monotone(lambda v: np.sqrt(np.maximum(v, 0)))


def softplus(x):
    return x.monotone(lambda v: np.logaddexp(v, 0))


def sigmoid(x):
    # Computed through tanh, which near -1 loses digits: its error is a part of 1, not of the result.
    return x.monotone(lambda v: 1 / (1 + np.exp(np.minimum(-v, 700))), absolute=FUNCTION)


def clip01(x):
    return x.monotone(lambda v: np.clip(v, 0, 1), own=0)


def log_softmax(x):
    shifted = x - Rounded(x.value.max(-1, keepdims=True), x.error.max(-1, keepdims=True))
    total = exp(shifted).sum()
    return shifted - log(Rounded(total.value[..., None], total.error[..., None]))


def cross_entropy(logits, target):
    return -(target * log_softmax(logits)).sum()


def huber(prediction, target, delta):
    difference = prediction - target
    size = Rounded(np.abs(difference.value), difference.error)
    q = size.monotone(lambda v: np.minimum(v, delta), own=0)
    # |e| - min(|e|, delta), written so that the two errors of the same |e| cancel, as they do.
    return 0.5 * q * q + delta * (size - delta).monotone(lambda v: np.maximum(v, 0), own=0)


def stacked(*parts):
    return Rounded(np.stack([part.value for part in parts], -1), np.stack([part.error for part in parts], -1))


def specified_terms(outputs, batch, k) -> dict[str, Rounded]:
    """The table of section 3, from the arrays' names and column numbers of the specification."""
    o = {name: Rounded(value) for name, value in outputs._asdict().items()}
    batch = {name: np.asarray(value, np.float64) for name, value in batch.items()}
    columns = batch["globalTargetsNC"]
    col = lambda i: Rounded(columns[:, i])  # noqa: E731
    counts, values = Rounded(batch["policyTargetsNCMove"]), batch["valueTargetsNCHW"]
    rows, area = len(columns), values.shape[-1] ** 2
    total = counts.sum()
    t = counts / Rounded(total.value[..., None], total.error[..., None])
    t0, t1 = t[:, 0], t[:, 1]
    g, wp, wo = col(25), col(26), col(27)
    policy = o["policy"]
    misc, more = o["misc"], o["more_misc"]

    def soft(target):
        raised = (target + 1e-7).monotone(lambda v: v**0.25)
        sums = raised.sum()
        return raised / Rounded(sums.value[..., None], sums.error[..., None])

    td_logits = (misc[:, 4:7], misc[:, 7:10], more[:, 2:5])
    td_scores = [20 * more[:, i] for i in (5, 6, 7)]
    score_mean, stdev = 20 * misc[:, 0], 20 * softplus(misc[:, 1])
    lead, variance_time = 20 * misc[:, 2], 40 * softplus(misc[:, 3])
    half0, half1 = softplus(more[:, 0] / 2), softplus(more[:, 1] / 2)
    value_error, score_error = 0.25 * (half0 * half0), 150 * (half1 * half1)
    chances = exp(log_softmax(td_logits[2]))
    short_value = chances[:, 0] - chances[:, 1]
    real_value, real_score = col(12) - col(13), col(15)

    win = col(0) + 0.5 * col(2)
    z = (col(3) - score_mean) / sqrt(stdev * stdev + 0.25)
    long_weight = clip01(win * win + sigmoid(3 * (z - 1.5))) * wp * wo
    zv = (real_value - short_value) / sqrt(value_error + 1e-4)
    zs = (real_score - td_scores[2]) / sqrt(score_error + 0.25)
    short_weight = clip01(sigmoid(3 * (zv - 1.5)) + sigmoid(3 * (zs - 1.5))) * wp * wo

    terms = {
        "p0loss": (g * wp * cross_entropy(policy[:, 0], t0)).sum(),
        "p1loss": 0.15 * (g * col(28) * cross_entropy(policy[:, 1], t1)).sum(),
        "p0softloss": (g * wp * cross_entropy(policy[:, 2], soft(t0))).sum(),
        "p1softloss": 0.15 * (g * col(28) * cross_entropy(policy[:, 3], soft(t1))).sum(),
        "p0lopt": (g * long_weight * cross_entropy(policy[:, 4], t0)).sum(),
        "p0sopt": (g * short_weight * cross_entropy(policy[:, 5], t0)).sum(),
        "vloss": 1.20 * (g * (1 - col(35)) * cross_entropy(o["value"], Rounded(columns[:, 0:3]))).sum(),
    }
    for i, (logits, first) in enumerate(zip(td_logits, (4, 8, 12))):
        target = Rounded(columns[:, first : first + 3])
        excess = cross_entropy(logits, target) - cross_entropy(log(target + 1e-30), target)
        terms[f"tdvloss{i + 1}"] = (1.20 * g * (1 - col(24)) * excess).sum()
    td_hubers = stacked(*(huber(score, col(column), 12) for score, column in zip(td_scores, (7, 11, 15))))
    terms["tdsloss"] = 0.0004 * (g * wo * td_hubers.sum()).sum()

    flat = lambda x: Rounded(x.value.reshape(rows, -1), x.error.reshape(rows, -1))  # noqa: E731
    owned = Rounded(values[:, 0].reshape(rows, area))
    prediction = flat(o["ownership"])
    ce = cross_entropy(stacked(prediction, -prediction), stacked((1 + owned) / 2, (1 - owned) / 2))
    terms["oloss"] = 1.5 * (g * wo * (ce.sum() / area)).sum()
    difference = flat(o["scoring"]) - Rounded(values[:, 4].reshape(rows, area)) / 120
    mean_square = (difference * difference).sum() / area
    terms["sloss"] = 4 * (g * col(34) * (sqrt(0.5 * mean_square + 1) - 1)).sum()
    future = o["future"].monotone(np.tanh) - Rounded(values[:, 2:4])
    squares = (future * future).sum((-1, -2))
    terms["fploss"] = 0.25 * (g * col(33) * ((squares[:, 0] + 0.25 * squares[:, 1]) / area**0.5)).sum()
    seki = Rounded(values[:, 1].reshape(rows, area))
    parts = Rounded(o["seki"].value.reshape(rows, 4, area))
    relu = lambda x: x.monotone(lambda v: np.maximum(v, 0), own=0)  # noqa: E731
    life = cross_entropy(stacked(*(parts[:, i] for i in range(3))), stacked(1 - seki * seki, relu(seki), relu(-seki)))
    unowned = cross_entropy(stacked(parts[:, 3], Rounded(np.zeros((rows, area)))), stacked(1 - owned * owned, owned * owned))
    terms["skloss"] = (g * k * wo * (life.sum() + 0.5 * unowned.sum()) / area).sum()

    terms["smloss"] = 0.0015 * (g * wo * huber(score_mean, col(3), 12)).sum()
    belief, target = o["score_belief"], Rounded(batch["scoreDistrN"]) / 100
    p = exp(belief)
    difference = p.cumsum() - target.cumsum()
    terms["sbcdfloss"] = 0.020 * (g * wo * (difference * difference).sum()).sum()
    terms["sbpdfloss"] = 0.020 * (g * wo * -(target * belief).sum()).sum()
    offsets = Rounded(np.arange(2 * (area + 60)) - (area + 60) + 0.5)
    mean = (p * offsets).sum()
    away = offsets - Rounded(mean.value[:, None], mean.error[:, None])
    variance = (p * (away * away)).sum()
    terms["sdregloss"] = 0.001 * (g * huber(stdev, sqrt(0.001 + variance), 10)).sum()
    terms["leadloss"] = 0.0060 * (g * col(29) * huber(lead, col(21), 8)).sum()
    terms["vtimeloss"] = 0.0003 * (g * wo * huber(variance_time, col(22) + 1e-5, 50)).sum()
    real = short_value - real_value
    terms["evstloss"] = 2.0 * (g * wo * huber(value_error, real * real + 1e-8, 0.4)).sum()
    real = td_scores[2] - real_score
    terms["esstloss"] = 0.00002 * (g * wo * huber(score_error, real * real + 1e-4, 100)).sum()
    hit = policy.value[:, 0].argmax(-1) == batch["policyTargetsNCMove"][:, 0].argmax(-1)
    terms["pacc1"] = (g * wp * Rounded(hit)).sum()
    terms["wsum"] = g.sum()
    total = Rounded(0.0)
    for name, weight in zip(METRICS[1:24], WEIGHTS, strict=True):
        total = total + weight * terms[name]
    terms["loss"] = total / rows
    return terms


@jax.jit
def computed_terms(outputs, batch, k):
    edge = batch["valueTargetsNCHW"].shape[-1]
    return loss.compute_terms(outputs, batch, k, make_tables_of(edge))


TABLES = {}


def make_tables_of(edge):
    if edge not in TABLES:
        with jax.ensure_compile_time_eval():
            TABLES[edge] = make_tables(ModelConfig(num_layers=1, hidden_size=8, num_heads=2, ffn_dim=8, pos_len=edge))
    return TABLES[edge]


def random_outputs(rand, rows, edge, scale=1.0) -> Outputs:
    area = edge * edge
    draw = lambda *shape: (scale * rand.standard_normal((rows, *shape))).astype(np.float32)  # noqa: E731
    belief = draw(2 * (area + 60))
    return Outputs(
        policy=2 * draw(6, area + 1),
        value=draw(3),
        misc=draw(10),
        more_misc=draw(8),
        ownership=draw(1, edge, edge),
        scoring=draw(1, edge, edge),
        future=draw(2, edge, edge),
        seki=draw(4, edge, edge),
        score_belief=np.asarray(jax.nn.log_softmax(belief)),
    )


def read_rows(folder, edge, rows):
    config = Config(pos_len=edge, batch_size=rows, symmetry_type="none")
    packed = next(read_packed_batches(sorted((folder / "train").glob("*.npz")), config, 1))
    return {key: np.array(value) for key, value in jax.jit(expand, static_argnames="pos_len")(packed, pos_len=edge).items()}


@pytest.fixture(scope="module")
def real_rows(rows9):
    return read_rows(rows9, 9, 16)


def with_weights(batch, rand):
    """Real rows with every weight column drawn, and with fractions on the board: as they are stored most weights are 0 or 1."""
    columns = batch["globalTargetsNC"].copy()
    for column in (24, 25, 26, 27, 28, 29, 33, 34, 35):
        columns[:, column] = rand.random(len(columns)).astype(np.float32)
    columns[:, 0:3] = rand.dirichlet([1, 1, 1], len(columns))  # "no result" never happens in the stored rows
    values = batch["valueTargetsNCHW"].copy()
    values[:, :4] = (2 * rand.random(values[:, :4].shape) - 1).astype(np.float32)
    return batch | {"globalTargetsNC": columns, "valueTargetsNCHW": values}


def assert_terms(got: Terms, expected: dict[str, Rounded], sharp=1e-3):
    """Every term within the bound, and the bound a small part of the term: so a wrong constant would be seen."""
    assert list(got._fields) == METRICS
    for name in METRICS:
        value, bound = expected[name].value, expected[name].error
        assert bound <= sharp * abs(value) or value == 0, (name, float(value), float(bound))
        assert got._asdict()[name].dtype == np.float32
        assert abs(float(getattr(got, name)) - value) <= bound, (name, float(getattr(got, name)), float(value), float(bound))


@pytest.mark.parametrize(("board", "edge", "rows"), [("rows9", 9, 16), ("rows19", 19, 4)])
def test_every_term_is_the_specifications(board, edge, rows, request):
    rand = np.random.default_rng(edge)
    batch = read_rows(request.getfixturevalue(board), edge, rows)
    outputs, k = random_outputs(rand, rows, edge), np.float32(0.37)
    assert_terms(computed_terms(outputs, batch, k), specified_terms(outputs, batch, k))
    weighted = with_weights(batch, rand)
    assert_terms(computed_terms(outputs, weighted, k), specified_terms(outputs, weighted, k))


def test_every_term_is_the_specifications_where_predictions_are_far_off(real_rows):
    # Predictions some tens wrong: the Huber losses are beyond their delta, optimism is clipped at 0 and at 1.
    rand = np.random.default_rng(3)
    outputs, batch = random_outputs(rand, 16, 9, scale=6.0), with_weights(real_rows, rand)
    batch["globalTargetsNC"][:4, 3] = 300
    assert_terms(computed_terms(outputs, batch, np.float32(7)), specified_terms(outputs, batch, np.float32(7)))


def test_every_term_is_the_specifications_where_only_the_small_constants_are_left(real_rows):
    # Predictions that hit their targets exactly: what is left are the constants under the roots and beside the squares.
    rand = np.random.default_rng(4)
    outputs, batch = random_outputs(rand, 16, 9), with_weights(real_rows, rand)
    misc, more, columns = outputs.misc.copy(), outputs.more_misc.copy(), batch["globalTargetsNC"]
    misc[:, [0, 2]], misc[:, [1, 3]] = 0, -40  # score mean and lead 0; their spreads softplus(-40)
    more[:, [0, 1]], more[:, 2:8] = -40, 0  # errors softplus(-20)^2; TD logits and scores 0
    columns[:, 0:3], columns[:, 12:15] = [0, 1, 0], 1 / 3
    columns[:, [15, 21, 22]] = 0
    columns[:, 3] = 0.6 + 0.3 * rand.random(16)  # z from 1.2 to 1.8, where the optimism's sigmoid is steep
    belief = np.full((16, 282), -200, np.float32)
    belief[:, 141] = 0
    outputs = outputs._replace(misc=misc, more_misc=more, score_belief=belief)
    expected = specified_terms(outputs, batch, np.float32(1))
    for name, value in {
        "evstloss": 2.0 * 0.5e-16,
        "esstloss": 0.00002 * 0.5e-8,
        "vtimeloss": 0.0003 * 0.5e-10,
        "sdregloss": 0.001 * 0.0005,
    }.items():
        weight = columns[:, 25] * (1 if name == "sdregloss" else columns[:, 27])
        np.testing.assert_allclose(expected[name].value, value * weight.sum(dtype=np.float64), rtol=1e-5, err_msg="the reference is off")
    got = computed_terms(outputs, batch, np.float32(1))
    # Cross-entropies of a prediction with itself, and squares of what float32 can hardly tell from zero, have no digits.
    for name in set(METRICS) - {"tdvloss3"}:
        value, bound = expected[name].value, expected[name].error
        assert abs(float(getattr(got, name)) - value) <= bound, name
        assert bound <= 0.01 * abs(value) or value == 0, name


def test_the_loss_is_the_sum_of_the_terms_over_rows_not_over_weights(real_rows):
    outputs = random_outputs(np.random.default_rng(5), 16, 9)
    light = real_rows | {"globalTargetsNC": real_rows["globalTargetsNC"].copy()}
    light["globalTargetsNC"][:, 25] = 0.5
    heavy, halved = computed_terms(outputs, real_rows, np.float32(1)), computed_terms(outputs, light, np.float32(1))
    # Halving is exact: half the weight is half the loss. Divided by the weights it would be the same loss.
    assert all(float(b) == 0.5 * float(a) for a, b in zip(heavy, halved))
    assert heavy.wsum == 16 and halved.wsum == 8


def test_a_weighted_sum_is_divided_by_the_rows_on_any_device(real_rows):
    # Row losses 1, 1, 3, 3 and row weights 1, 1, 1, 0: 1.25, not 1.667 (mean over weights) or 2.0 (mean of local such means).
    device_mesh = make_mesh(Config(pos_len=9, batch_size=4, data_parallel=True, data_parallel_devices=2))

    def body(rows):
        row_loss, weight = rows["loss"][0], rows["weight"][0]
        zeros = {name: jnp.zeros_like(row_loss[0]) for name in METRICS}
        weighted = jnp.sum(weight * row_loss)
        return sum_terms(Terms(**zeros | {"p0loss": weighted, "wsum": jnp.sum(weight), "loss": weighted / len(weight)}))

    mean = jax.jit(shard(body, device_mesh, inputs=("batch",), outputs="result"))
    losses, weights = np.array([1, 1, 3, 3], np.float32), np.array([1, 1, 1, 0], np.float32)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [3, 0, 1, 2]):
        terms = mean(put_batches(device_mesh, [{"loss": losses[order], "weight": weights[order]}]))
        assert (terms.loss, terms.p0loss, terms.wsum) == (1.25, 5, 3)
    terms = mean(put_batches(device_mesh, [{"loss": losses, "weight": np.array([1, 1, 0, 0], np.float32)}]))
    assert (terms.loss, terms.p0loss, terms.wsum) == (0.5, 2, 2)  # a device whose weights are all 0


def test_rows_may_lie_on_any_device(real_rows):
    # The same with the real terms: 4 rows, one without weight, on 2 devices in several orders.
    device_mesh = make_mesh(Config(pos_len=9, batch_size=4, data_parallel=True, data_parallel_devices=2))
    batch = {key: value[:4].copy() for key, value in real_rows.items() if key not in ("binaryInputNCHW", "globalInputNC")}
    batch["globalTargetsNC"][3, 25] = 0
    outputs = random_outputs(np.random.default_rng(6), 4, 9)
    rows = batch | {f"outputs/{name}": value for name, value in outputs._asdict().items()}

    def body(rows):
        rows = {key: value[0] for key, value in rows.items()}
        outputs = Outputs(*(rows[f"outputs/{name}"] for name in Outputs._fields))
        return sum_terms(loss.compute_terms(outputs, rows, jnp.float32(0.5), make_tables_of(9)))

    reduced = jax.jit(shard(body, device_mesh, inputs=("batch",), outputs="result"))
    expected = specified_terms(outputs, batch, np.float32(0.5))
    for order in ([0, 1, 2, 3], [3, 1, 2, 0], [2, 0, 3, 1]):
        assert_terms(reduced(put_batches(device_mesh, [{key: value[order] for key, value in rows.items()}])), expected)
    batch["globalTargetsNC"][2, 25] = 0  # now the second device has no weight at all
    assert_terms(reduced(put_batches(device_mesh, [rows | batch])), specified_terms(outputs, batch, np.float32(0.5)))


# Gradients


POLICY = {name: {f"policy.{i}"} for i, name in enumerate(("p0loss", "p1loss", "p0softloss", "p1softloss", "p0lopt", "p0sopt"))}
# Term -> the head channels that receive its gradient. Everything that is not here must receive exactly zero: what only
# weighs another term (p0lopt, p0sopt) or is a target of another prediction (evstloss, esstloss, sdregloss's own belief aside).
RECEIVERS = POLICY | {
    "vloss": {"value"},
    "tdvloss1": {"misc.4", "misc.5", "misc.6"},
    "tdvloss2": {"misc.7", "misc.8", "misc.9"},
    "tdvloss3": {"more_misc.2", "more_misc.3", "more_misc.4"},
    "tdsloss": {"more_misc.5", "more_misc.6", "more_misc.7"},
    "oloss": {"ownership"},
    "sloss": {"scoring"},
    "fploss": {"future"},
    "skloss": {"seki"},
    "smloss": {"misc.0"},
    "sbcdfloss": {"score_belief"},
    "sbpdfloss": {"score_belief"},
    "sdregloss": {"misc.1", "score_belief"},
    "leadloss": {"misc.2"},
    "vtimeloss": {"misc.3"},
    "evstloss": {"more_misc.0"},
    "esstloss": {"more_misc.1"},
    "pacc1": set(),
    "wsum": set(),
}


def receivers(gradient) -> set[str]:
    """The head channels in which a gradient is not exactly zero."""
    found = set()
    for name, value in gradient._asdict().items():
        if name in ("policy", "misc", "more_misc"):
            found |= {f"{name}.{i}" for i in range(value.shape[1]) if np.any(value[:, i])}
        elif np.any(value):
            found.add(name)
    return found


@pytest.fixture(scope="module")
def jacobian(real_rows):
    """Gradient of every term with respect to every head output: Terms of Outputs."""
    outputs = random_outputs(np.random.default_rng(7), 16, 9)
    batch = with_weights(real_rows, np.random.default_rng(8))
    tables = make_tables_of(9)

    @jax.jit
    def gradients(outputs):
        _, pull = jax.vjp(lambda o: jnp.stack(loss.compute_terms(o, batch, jnp.float32(0.5), tables)), outputs)
        return jax.vmap(lambda one: pull(one)[0])(jnp.eye(len(METRICS)))

    found = jax.device_get(gradients(outputs))
    return {name: jax.tree.map(lambda leaf: leaf[i], found) for i, name in enumerate(METRICS)}


@pytest.mark.parametrize("term", METRICS[1:])
def test_a_terms_gradient_reaches_its_own_head_and_no_other(jacobian, term):
    assert receivers(jacobian[term]) == RECEIVERS[term]


def test_the_losss_gradient_is_the_weighted_sum_of_the_terms(jacobian):
    for leaf in Outputs._fields:
        parts = [weight * np.asarray(getattr(jacobian[name], leaf), np.float64) for name, weight in zip(METRICS[1:24], WEIGHTS, strict=True)]
        got = np.asarray(getattr(jacobian["loss"], leaf), np.float64)
        # 23 sums, a product and the handful of operations behind it, each rounded; inside them numbers as large as the
        # largest gradients cancel (a softmax less its target).
        limit = 64 * UNIT * np.abs(parts).sum(0).max() / 16
        assert (np.abs(got - np.sum(parts, 0) / 16) <= limit).all(), leaf
        assert np.any(got), leaf


def test_without_a_stop_gradient_the_receivers_are_others(real_rows, monkeypatch):
    # The check above can fail: with the stops gone, what weighs a term receives its gradient.
    monkeypatch.setattr(loss, "sg", lambda x: x)
    outputs, tables = random_outputs(np.random.default_rng(7), 16, 9), make_tables_of(9)
    terms = lambda o: loss.compute_terms(o, real_rows, jnp.float32(0.5), tables)  # noqa: E731
    found = jax.jit(lambda o: [jax.grad(lambda o: getattr(terms(o), name))(o) for name in ("p0lopt", "p0sopt", "evstloss", "esstloss")])(outputs)
    assert [receivers(gradient) for gradient in found] == [
        {"policy.4", "misc.0", "misc.1"},
        {"policy.5", "more_misc.0", "more_misc.1", "more_misc.2", "more_misc.3", "more_misc.4", "more_misc.7"},
        {"more_misc.0", "more_misc.2", "more_misc.3", "more_misc.4"},
        {"more_misc.1", "more_misc.7"},
    ]


# Profiles


PROFILES = {"policy_value": {"p0loss": 0.93, "vloss": 0.6}, "policy_only": {"p0loss": 0.93}, "value_only": {"vloss": 0.6}}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profiles_loss_is_its_terms_over_rows_and_the_terms_stay(real_rows, profile):
    outputs, tables = random_outputs(np.random.default_rng(11), 16, 9), make_tables_of(9)
    full, got = (jax.jit(lambda o, p=p: loss.compute_terms(o, real_rows, jnp.float32(1), tables, p))(outputs) for p in ("full", profile))
    expected = sum(weight * Rounded(float(getattr(full, name))) for name, weight in PROFILES[profile].items()) / 16
    assert abs(float(got.loss) - expected.value) <= expected.error and float(got.loss) < float(full.loss)
    assert all(getattr(got, name) == getattr(full, name) for name in Terms._fields if name != "loss")
    assert set(loss.PROFILES) == {"full", *PROFILES}


# The seki weight and its statistics


def test_the_unowned_share_is_the_specifications(real_rows):
    batch = with_weights(real_rows, np.random.default_rng(9))
    ownership = Rounded(batch["valueTargetsNCHW"][:, 0].reshape(16, 81))
    expected = ((1 - ownership * ownership).sum() / (1 + 81) * Rounded(batch["globalTargetsNC"][:, 27])).sum() / 16
    got = float(jax.jit(loss.unowned_share)(batch))
    assert abs(got - expected.value) <= expected.error < 1e-4 * expected.value
    # Linear in the rows: the mean over the halves is the whole's, so the statistics do not depend on the devices.
    halves = [float(loss.unowned_share({key: value[part] for key, value in batch.items()})) for part in (slice(8), slice(8, 16))]
    assert abs(np.mean(halves) - expected.value) <= expected.error


def test_the_statistics_move_by_the_originals_momentum():
    f = np.float32
    first = loss.update_statistics(MovingStatistics(jnp.float32(0), jnp.float32(0)), jnp.float32(0.25))
    assert (first.sum, first.weight) == (0.25, 1)
    second = loss.update_statistics(first, jnp.float32(0.125))
    assert (second.sum, second.weight) == (f(0.998) * f(0.25) + f(0.125), f(0.998) + f(1))
    assert {leaf.dtype for leaf in second} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("total", "weight", "k"), [(0, 1, 8), (0.005, 1, 4), (0.035, 1, 1), (3.95, 2, 0.04 / 1.98), (7.0, 200, 1)])
def test_the_seki_weight_falls_as_unowned_points_are_common(total, weight, k):
    got = float(loss.seki_weight(MovingStatistics(jnp.float32(total), jnp.float32(weight))))
    assert abs(got - k) <= 8 * UNIT * k


def test_evaluation_has_a_constant_seki_weight():
    assert loss.EVALUATION_SEKI_WEIGHT == 7.0


def test_a_row_without_policy_visits_poisons_the_step_even_without_weight(real_rows):
    # A property of the original that is kept: npz.load_rows refuses such rows before they get here.
    batch = {key: value.copy() for key, value in real_rows.items()}
    batch["policyTargetsNCMove"][5, 0] = 0
    batch["globalTargetsNC"][5, 25] = 0
    outputs = random_outputs(np.random.default_rng(10), 16, 9)
    terms = computed_terms(outputs, batch, np.float32(1))
    assert np.isnan(terms.loss) and np.isnan(terms.p0loss) and not np.isnan(terms.vloss)
