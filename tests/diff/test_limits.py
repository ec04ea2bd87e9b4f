"""The limits follow from the old side and float64 alone, let honest rounding pass, and let nothing else pass."""

import ml_dtypes
import numpy as np
import pytest

from kgo_shard.diff import limits
from kgo_shard.diff.compare import STAGES, compare

FLOAT32 = np.dtype(np.float32)


def test_limit_is_twice_the_largest_of_own_noise_expected_and_rounding():
    for errors in ((3e-6, 1e-7, 1e-8, 0.0), (0.0, 3e-6, 1e-7, 1e-8), (0.0, 0.0, 3e-6, 1e-8), (0.0, 0.0, 0.0, 3e-6)):
        assert limits.limit_for(limits.old_error(*errors)) == 6e-6
    assert limits.limit_for(limits.old_error(0.0, 0.0, 0.0, 0.0)) == 0.0


def test_weights_are_measured_by_their_change_and_all_else_by_its_value():
    start, reference = np.full(4, 100.0), np.full(4, 100.5)
    assert limits.scale_of("parameters", reference, start) == limits.scale_of("ema", reference, start) == 1.0
    assert limits.scale_of("moments", reference, start) == limits.scale_of("parameters", reference, None) == 201.0
    assert limits.scale_of("parameters", start, start) == 200.0  # nothing has moved
    assert set(limits.CHANGE_STAGES | limits.EXACT_STAGES | limits.NORM_STAGES | limits.SCHEDULE_STAGES) <= set(STAGES)


def test_a_wrong_update_does_not_hide_behind_large_weights():
    """Twice the update is 1e-4 of the weights."""
    start = {"parameters/w": np.full(1000, 100.0)}
    reference = [start, {"parameters/w": start["parameters/w"] + 0.01 * np.linspace(0.5, 1.5, 1000)}]
    a = [{k: x.astype(np.float32) for k, x in step.items()} for step in reference]
    b = [a[0] | {}, {"parameters/w": a[1]["parameters/w"] + np.float32(0.01)}]
    first = compare(a, b, reference).first_bad
    assert first.name == "parameters/w" and first.error_b > 0.9 and first.x_of_limit > 100


def test_a_bfloat16_weight_that_was_not_updated_is_found_beside_others_whose_updates_are_rounded_away():
    """Weights of 0.01 to 3, each moved by about 0.001: of the largest the rounding leaves nothing, of the smallest all."""
    random = np.random.default_rng(0)
    sizes = {f"parameters/blocks/{i}/w": 10 ** (-2 + i / 8) for i in range(20)}
    start = {name: (size * random.standard_normal(500)).astype(ml_dtypes.bfloat16) for name, size in sizes.items()}
    reference = [{name: w.astype(np.float64) for name, w in start.items()}]
    reference.append({name: w + 0.001 * random.standard_normal(500) for name, w in reference[0].items()})
    a, b = ([start, {n: (w * (1 + 1e-3 * side)).astype(ml_dtypes.bfloat16) for n, w in reference[1].items()}] for side in (0, 1))
    assert compare(a, b, reference).equal
    small = next(iter(sizes))
    assert compare(a, [start, b[1] | {small: start[small]}], reference).first_bad.name == small


def test_leaves_of_two_kinds_do_not_excuse_each_other():
    """Half the leaves are off by a hundredth, half by a millionth: one of the second kind that is wrong by a thousandth is found."""
    random = np.random.default_rng(0)
    start = {f"parameters/{kind}/{i}/w": np.zeros(300) for kind in ("muon", "adamw") for i in range(12)}
    moved = {name: random.standard_normal(300) for name in start}

    def side(dtype=np.float32):
        after = {n: x * (1 + (1e-2 if "muon" in n else 1e-6) * random.standard_normal(300)) for n, x in moved.items()}
        return [{n: x.astype(dtype) for n, x in start.items()}, {n: x.astype(dtype) for n, x in after.items()}]

    a, b, noise, reference = side(), side(), side(), [start, moved]
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    assert compare(a, b, reference, [noise], bfloat16).equal
    b[1]["parameters/adamw/3/w"] *= np.float32(1.001)
    assert compare(a, b, reference, [noise], bfloat16).first_bad.name == "parameters/adamw/3/w"
    assert compare(a, b, reference, (), bfloat16).equal  # nothing then tells which leaves are of which kind


def test_a_mistake_that_the_new_side_shares_with_the_reference_is_found(reference, old):
    """Their gradients are a thousandth too large: they agree, and twice the old side's distance from them would be a wide limit."""
    wrong = {dtype: regression(dtype, ORDER, 4, factor=1.001) for dtype in (np.float32, np.float64)}
    first = compare(old, wrong[np.float32], wrong[np.float64]).first_bad
    assert (first.step, first.stage) == (1, "reduced_gradient") and "too far for rounding in float32" in first.reason
    assert compare(old, wrong[np.float32], wrong[np.float64], coarsest=np.dtype(ml_dtypes.bfloat16)).equal  # it is rounding there


def test_an_average_of_bfloat16_weights_inherits_their_rounding():
    random = np.random.default_rng(0)
    start = {"parameters/w": random.standard_normal(500).astype(ml_dtypes.bfloat16)}
    start["ema/w"] = start["parameters/w"].astype(np.float32)
    moved = start["parameters/w"].astype(np.float64) + 0.001
    reference = [{name: x.astype(np.float64) for name, x in start.items()}]
    reference.append({"parameters/w": moved, "ema/w": 0.9 * reference[0]["ema/w"] + 0.1 * moved})
    stored = moved.astype(ml_dtypes.bfloat16)
    after = {"parameters/w": stored, "ema/w": (0.9 * start["ema/w"] + 0.1 * stored.astype(np.float32)).astype(np.float32)}
    assert compare([start, after], [start | {}, {name: x.copy() for name, x in after.items()}], reference).equal


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_storing_the_exact_result_stays_below_the_rounding_error(dtype):
    exact = np.random.default_rng(0).standard_normal((1000, 4))
    for row in exact:
        error = limits.norm(row.astype(dtype).astype(np.float64) - row)
        assert 0 < error <= limits.rounding_error(row, np.dtype(dtype))


def test_chance_is_what_draws_do():
    """Of 4000 leaves about one exceeds it: never one in a hundred, and not none in a million."""
    random = np.random.default_rng(0)
    for size in (1, 2, 6, 30, 1000):
        repeats = 200 if size < 1000 else 5
        draws = np.sqrt(np.mean(np.square(random.standard_normal((repeats * 4000, size), np.float32)), axis=1))
        exceeded = float((draws > limits.chance(size, 4000)).sum()) / repeats
        assert 0.3 < exceeded < 3, (size, exceeded)
    assert limits.chance(1, 4000) > 3.5 and limits.chance(10**6, 4000) < 1.01 and limits.chance(1, 1) == 1.0


def test_one_leaf_with_a_huge_relative_error_excuses_no_other():
    """Its terms cancel to nothing; a mean of squares would lend its error to the whole stage."""
    honest = 1e-7 * np.exp(0.4 * np.random.default_rng(0).standard_normal(60))
    alone, with_outliers = (limits.expected_error(e, 4000) for e in (honest, [*honest, 1e8, 1e3, 1e8]))
    assert 2e-7 < alone < 1e-6 and with_outliers < 2 * alone
    assert limits.expected_error([0.0, 0.0], 4000) == limits.typical_error([]) == 0.0


def test_norm_is_excused_by_the_error_of_the_whole_gradient():
    assert limits.whole_error([3e-6, 4e-6], [0.6, 0.8]) == pytest.approx(5e-6)


def test_norm_rounding_is_what_sums_one_after_another_come_to():
    """The root mean square of 50 such norms' errors is below it, and above a thirtieth of it."""
    random = np.random.default_rng(0)
    errors = []
    for _ in range(50):
        x = random.standard_normal(2000).astype(np.float32)
        total = np.float32(0)
        for square in x * x:
            total += square
        exact = np.linalg.norm(x.astype(np.float64))
        errors.append(float(np.sqrt(total)) / exact - 1)
    expected = limits.norm_rounding([2000], FLOAT32)
    assert expected / 30 < np.sqrt(np.mean(np.square(errors))) < expected
    assert limits.norm_rounding([], FLOAT32) == 0.0


def test_summation_limit_holds_for_any_order():
    random = np.random.default_rng(0)
    x = random.standard_normal(200).astype(np.float32)
    exact, bound = x.astype(np.float64).sum(), limits.summation_limit(199, float(np.abs(x).sum()), FLOAT32)
    for _ in range(50):
        total = np.float32(0)
        for term in random.permutation(x):
            total += term
        assert abs(total - exact) <= bound
    assert bound < 2e-3 and limits.summation_limit(0, 1.0, FLOAT32) == 0.0


def test_every_limit_has_a_reason():
    assert len({limit.name for limit in limits.LIMITS}) == len(limits.LIMITS)
    assert all(len(limit.reason) > 40 for limit in limits.LIMITS)
    assert f"{limits.FACTOR} x" in next(limit.limit for limit in limits.LIMITS if limit.name == "three-way bound")


# Two honest float32 computations of one thing, and dishonest ones


def regression(dtype, order: np.ndarray, shards: int, steps: int = 12, factor: float = 1.0, spoil: str = "") -> list[dict]:
    """Adam on a two-layer net with a bias under a softmax; sums over rows in `order`, in `shards` parts.

    `factor` multiplies the gradient, `spoil` names a leaf whose gradient is a thousandth too large from step 2 on.
    """
    random = np.random.default_rng(7)
    x = np.asarray(random.standard_normal((steps, 64, 20)), np.float32)
    labels = random.integers(0, 5, (steps, 64))
    p = {
        "a/w": random.standard_normal((20, 30)) / 4,
        "a/b": np.zeros(30),
        "blocks/0/w": random.standard_normal((30, 30)) / 5,
        "blocks/1/w": random.standard_normal((30, 30)) / 5,
        "gain": np.ones(1),
        "head/w": random.standard_normal((30, 5)) / 5,
        "head/shift": np.zeros(1),  # added to all logits: its gradient is zero in exact arithmetic
    }
    p = {name: value.astype(np.float32).astype(dtype) for name, value in p.items()}
    m, v = ({name: np.zeros_like(value) for name, value in p.items()} for _ in range(2))
    trace = [{f"parameters/{name}": value for name, value in p.items()}]
    for step in range(1, steps + 1):
        g, losses = {name: np.zeros_like(value) for name, value in p.items()}, {}
        for rows in np.split(order, shards):
            part, losses_part = gradient(p, x[step - 1][rows].astype(dtype), labels[step - 1][rows])
            g = {name: g[name] + part[name] / dtype(shards) * dtype(factor) for name in p}
            losses = {name: losses.get(name, dtype(0)) + losses_part[name] / dtype(shards) for name in losses_part}
        if spoil and step > 1:
            g[spoil] = g[spoil] * dtype(1.001)
        m = {name: dtype(0.9) * m[name] + dtype(0.1) * g[name] for name in p}
        v = {name: dtype(0.95) * v[name] + dtype(0.05) * g[name] * g[name] for name in p}
        rate = dtype(1e-2) * dtype(min(1, step / 10))
        hat = {name: m[name] / dtype(1 - 0.9**step) / (np.sqrt(v[name] / dtype(1 - 0.95**step)) + dtype(1e-8)) for name in p}
        p = {name: p[name] - rate * hat[name] for name in p}
        entry = {"batch/x": x[step - 1].astype(dtype), "norm": np.sqrt(sum(np.sum(part * part) for part in g.values()))}
        entry |= {"learning_rate": np.asarray(rate)} | {f"loss_terms/{name}": np.asarray(value) for name, value in losses.items()}
        for stage, tree in (("reduced_gradient", g), ("moments/m", m), ("moments/v", v), ("parameters", p)):
            entry |= {f"{stage}/{name}": value for name, value in tree.items()}
        trace.append(entry)
    assert all(value.dtype == dtype for entry in trace for value in entry.values())
    return trace


def gradient(p, x, labels):
    """Gradients and loss terms of the mean over the rows, all in the rows' dtype."""
    rows = np.arange(len(x))
    count = x.dtype.type(len(x))
    hidden = [np.tanh(x @ p["a/w"] + p["a/b"])]
    for i in range(2):
        hidden.append(np.tanh(hidden[-1] @ p[f"blocks/{i}/w"]))
    out = hidden[-1] * p["gain"]
    unshifted = out @ p["head/w"]
    logits = unshifted + p["head/shift"]
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = shifted / shifted.sum(axis=1, keepdims=True)
    losses = {"cross": -np.log(chosen[rows, labels]).sum() / count, "square": (unshifted * unshifted).sum() / count}
    d = chosen.copy()
    d[rows, labels] -= 1
    d /= count
    g = {"head/w": out.T @ d, "head/shift": d.sum(keepdims=True).reshape(1)}
    d = d @ p["head/w"].T
    g["gain"] = (d * hidden[-1]).sum(keepdims=True).reshape(1)
    d = d * p["gain"]
    for i in (1, 0):
        d = d * (1 - hidden[i + 1] ** 2)
        g[f"blocks/{i}/w"] = hidden[i].T @ d
        d = d @ p[f"blocks/{i}/w"].T
    d = d * (1 - hidden[0] ** 2)
    return g | {"a/w": x.T @ d, "a/b": d.sum(axis=0)}, losses


ORDER = np.arange(64)


@pytest.fixture(scope="module")
def reference():
    return regression(np.float64, ORDER, 1)


@pytest.fixture(scope="module")
def old():
    return regression(np.float32, ORDER, 8)


def test_other_orders_of_summation_pass(reference, old):
    """16 honest sides, each as the old and as the new one."""
    sides = [regression(np.float32, np.random.default_rng(i).permutation(64), 2 ** (i % 6)) for i in range(16)]
    for i, new in enumerate(sides):
        for a, b in ((old, new), (new, old), (new, sides[i - 1])):
            result = compare(a, b, reference)
            assert result.equal, result.verdict()
            assert sum(leaf.equal_bits for leaf in result.leaves) < 0.5 * len(result.leaves)


@pytest.mark.parametrize("factor", [2.0, 8.0, 0.125])
def test_a_gradient_that_is_not_averaged_fails_where_it_is_made(reference, old, factor):
    first = compare(old, regression(np.float32, ORDER, 4, factor=factor), reference).first_bad
    assert (first.step, first.stage) == (1, "reduced_gradient")


@pytest.mark.parametrize("leaf", ["a/w", "a/b", "blocks/1/w", "gain", "head/w"])
def test_a_thousandth_in_one_leaf_fails_where_it_is_made(reference, old, leaf):
    first = compare(old, regression(np.float32, ORDER, 4, spoil=leaf), reference).first_bad
    assert (first.step, first.name) == (2, f"reduced_gradient/{leaf}")


def test_a_leaf_that_is_zero_in_exact_arithmetic_may_hold_noise_but_nothing_else(reference, old):
    new = regression(np.float32, ORDER, 4)
    noise = [leaf for leaf in compare(old, new, reference).leaves if leaf.name == "reduced_gradient/head/shift"]
    assert max(leaf.error_a for leaf in noise) > 1 and all(leaf.passed for leaf in noise)
    new[3]["reduced_gradient/head/shift"] = np.float32([1e-5])
    assert compare(old, new, reference).first_bad.name == "reduced_gradient/head/shift"
