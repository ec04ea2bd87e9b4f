"""The comparison sees every kind of difference, names the first one, and refuses to compare nothing."""

import ml_dtypes
import numpy as np
import pytest

from kgo_shard.diff.compare import STAGES, CompareError, compare, flow_order, max_distance
from kgo_shard.diff.limits import is_float


def make_trace(steps: int = 2, dtype=np.float32, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """A start state and `steps` steps in which every stage has leaves."""
    random = np.random.default_rng(seed)
    trace = []
    for i in range(steps + 1):
        step = {
            f"{stage}/{leaf}": np.asarray(random.standard_normal((4, 3)), dtype)
            for stage in STAGES
            for leaf in ("blocks/0/w", "blocks/2/w", "blocks/10/w")
            if stage not in ("norm", "clip", "learning_rate", "counts")
        }
        step |= {stage: np.asarray(random.standard_normal(), dtype) for stage in ("norm", "clip", "learning_rate")}
        trace.append(step | {"counts/step": np.asarray(i, np.int64)})
    return trace


def copy(trace):
    return [{key: x.copy() for key, x in step.items()} for step in trace]


def test_copies_are_equal_in_every_bit():
    trace = make_trace()
    result = compare(trace, copy(trace))
    assert result.equal and result.exit_code == 0 and result.first_bad is None
    assert len(result.leaves) == sum(map(len, trace))
    assert result.verdict() == f"EQUAL: {len(result.leaves)} leaves of 2 steps and their start state, every bit"


@pytest.mark.parametrize("stage", STAGES)
def test_one_bit_in_any_stage_is_found_and_named(stage):
    a = make_trace()
    b = copy(a)
    key = [key for key in a[2] if key.split("/")[0] == stage][-1]
    flat = b[2][key].reshape(-1).view(np.uint8)
    flat[0] ^= 1
    result = compare(a, b)
    bad = [leaf for leaf in result.leaves if not leaf.passed]
    assert [(leaf.step, leaf.name) for leaf in bad] == [(2, key)]
    assert bad[0].max_ulp == 1 and not bad[0].equal_bits
    assert result.exit_code == 1 and f"step 2, stage {stage}" in result.verdict()


def test_first_bad_is_earliest_in_step_then_stage_then_name():
    a = make_trace()
    b = copy(a)
    for step, key in [(2, "batch/blocks/0/w"), (1, "ema/blocks/0/w"), (1, "moments/blocks/10/w"), (1, "moments/blocks/2/w")]:
        b[step][key] *= 8
    result = compare(a, b)
    assert (result.first_bad.step, result.first_bad.name) == (1, "moments/blocks/2/w")
    assert result.verdict().startswith(
        "DIFFERENT: first at step 1, stage moments, leaf blocks/2/w: relative norm 7, 25165824 ulp; 2 of 3 leaves of that stage"
    )
    assert result.verdict().endswith(f"4 of {len(result.leaves)} in all")


def test_names_sort_by_number():
    keys = ["moments/blocks/10/w", "moments/blocks/2/w", "batch/z", "norm", "moments/a", "moments/10", "moments/9"]
    assert sorted(keys, key=flow_order) == [
        "batch/z", "norm", "moments/9", "moments/10", "moments/a", "moments/blocks/2/w", "moments/blocks/10/w"
    ]  # fmt: skip


def test_zeros_of_other_sign_differ_by_no_ulp_but_in_bits():
    result = compare([{"norm": np.float32([0.0])}], [{"norm": np.float32([-0.0])}])
    (leaf,) = result.leaves
    assert (leaf.max_ulp, leaf.equal_bits, leaf.passed) == (0, False, False)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_ulp_distance_counts_the_numbers_between(dtype):
    one = np.asarray([1.0], dtype)
    eps = ml_dtypes.finfo(dtype).eps
    assert max_distance(one, np.asarray([1.0 + 3 * float(eps)], dtype)) == 3
    tiny = np.asarray([float(ml_dtypes.finfo(dtype).smallest_subnormal)], dtype)
    assert max_distance(tiny, -tiny) == 2  # across zero, of which there is one
    largest = np.asarray([ml_dtypes.finfo(dtype).max], dtype)
    assert max_distance(largest, -largest) == 2 * int(largest.view(f"u{largest.dtype.itemsize}")[0])


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int64, np.uint8, np.uint64])
def test_integers_differ_by_their_difference(dtype):
    low, high = (False, True) if dtype is np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    assert max_distance(np.array([low], dtype), np.array([high], dtype)) == int(high) - int(low)
    assert not compare([{"counts": np.array([low], dtype)}], [{"counts": np.array([high], dtype)}]).equal


def test_bfloat16_is_compared_in_its_own_ulps():
    a = make_trace(dtype=ml_dtypes.bfloat16)
    b = copy(a)
    assert compare(a, copy(a)).equal
    b[1]["moments/blocks/0/w"].view(np.int16)[0, 0] += 5
    assert compare(a, b).first_bad.max_ulp == 5


def test_integers_that_pretend_to_be_bfloat16_are_refused():
    """NumPy stores bfloat16 in npz files as raw bytes; such a leaf has lost its numbers."""
    a = [{"moments/w": np.ones(2, ml_dtypes.bfloat16).view("V2")}]
    assert "side A is of dtype |V2" in compare(a, copy(a)).first_bad.reason


def break_(name):
    return {
        "missing": lambda b: b[1].pop("moments/blocks/0/w"),
        "extra": lambda b: b[1].update({"moments/more": np.ones(1, np.float32)}),
        "unknown stage": lambda b: b[1].update({"gradients/w": np.ones(1, np.float32)}),
        "NaN": lambda b: b[1]["moments/blocks/0/w"].__setitem__((0, 0), np.nan),
        "infinite": lambda b: b[1]["moments/blocks/0/w"].__setitem__((0, 0), np.inf),
        "shape": lambda b: b[1].update({"moments/blocks/0/w": b[1]["moments/blocks/0/w"].reshape(3, 4)}),
        "dtype": lambda b: b[1].update({"moments/blocks/0/w": b[1]["moments/blocks/0/w"].astype(np.float64)}),
        "not a NumPy array": lambda b: b[1].update({"moments/blocks/0/w": [1.0]}),
        "ends after 1 steps": lambda b: b.pop(),
        "it ends after 2 steps": lambda b: b.append(copy(b[-1:])[0]),
    }[name]


@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize(
    "name",
    ["missing", "extra", "unknown stage", "NaN", "infinite", "shape", "dtype", "not a NumPy array",
     "ends after 1 steps", "it ends after 2 steps"],
)  # fmt: skip
def test_what_cannot_be_compared_fails_with_its_reason(name, with_reference):
    a = make_trace()
    b = copy(a)
    break_(name)(b)
    result = compare(a, b, as_float64(a) if with_reference else None)
    assert not result.equal and name in result.first_bad.reason
    assert name in result.verdict()


def test_nan_on_both_sides_is_no_agreement():
    a = make_trace()
    a[1]["moments/blocks/0/w"][0, 0] = np.nan
    assert "NaN or infinite elements: 1 on side A, 1 on side B of 12" in compare(a, copy(a)).first_bad.reason


def test_empty_leaf_and_empty_step_fail():
    a = [{"norm": np.float32(1)}, {}, {"norm": np.zeros((0, 3), np.float32)}]
    b = [{"norm": np.float32(1)}, {}, {"norm": np.zeros((0, 3), np.float32)}]
    reasons = [leaf.reason for leaf in compare(a, b).leaves]
    assert reasons == ["", "this step holds no leaf on either side", "empty: shape (0, 3)"]


@pytest.mark.parametrize("empty", [[], [{}], [{}, {}]])
def test_an_empty_side_is_refused(empty):
    trace = make_trace()
    for arguments in [(empty, trace), (trace, empty), (empty, copy(empty)), (trace, copy(trace), empty)]:
        with pytest.raises(CompareError, match="nothing to compare"):
            compare(*arguments)


def test_a_side_compared_with_itself_is_refused():
    a = make_trace()
    shallow = [dict(step) for step in a]
    views = [{key: x[...] for key, x in step.items()} for step in a]
    for same in (a, shallow, views):
        with pytest.raises(CompareError, match="side A and side B are the same arrays"):
            compare(a, same)
        with pytest.raises(CompareError, match="side A and the reference"):
            compare(a, copy(a), same)
        with pytest.raises(CompareError, match="side B and the reference"):
            compare(copy(a), a, same)


# With a float64 reference


def as_float64(trace):
    return [{k: x.astype(np.float64) if is_float(x.dtype) else x.copy() for k, x in step.items()} for step in trace]


def noisy(reference, seed, size=1e-6):
    """float32 numbers around the reference, as an honest computation leaves them. The start and the rows are exact."""
    random = np.random.default_rng(seed)
    trace = [{k: x.astype(np.float32) if x.dtype == np.float64 else x.copy() for k, x in step.items()} for step in reference]
    for step in trace[1:]:
        for key, x in step.items():
            if x.dtype == np.float32 and not key.startswith("batch"):
                # A norm averages over the elements of the gradient, and its errors average with it; a schedule only rounds.
                part = {"norm": size / 6, "clip": size / 6, "learning_rate": 0}.get(key, size)
                step[key] = (x * (1 + part * random.standard_normal(x.shape))).astype(np.float32)
    return trace


def test_honest_rounding_passes_and_says_how_far_from_the_limit():
    reference = as_float64(make_trace(steps=5))
    for seed in range(5):
        result = compare(noisy(reference, 10 + seed), noisy(reference, 20 + seed), reference)
        assert result.equal, result.verdict()
        assert result.verdict().startswith("WITHIN LIMITS: ") and "x of its limit" in result.verdict()
        assert max(leaf.x_of_limit or 0 for leaf in result.leaves) > 0.1


@pytest.mark.parametrize("stage", ["loss_terms", "raw_gradient", "reduced_gradient", "norm", "clip", "learning_rate", "moments",
                                   "parameters", "ema", "moving_statistics", "metrics"])  # fmt: skip
@pytest.mark.parametrize("factor", [1.001, 8.0, 0.0])
def test_a_thousandth_in_one_leaf_fails_in_every_stage(stage, factor):
    reference = as_float64(make_trace(steps=3))
    a, b = noisy(reference, 1), noisy(reference, 2)
    key = [key for key in a[2] if key.split("/")[0] == stage][-1]
    b[2][key] = (b[2][key] * np.float32(factor)).astype(np.float32)
    bad = [(leaf.step, leaf.name) for leaf in compare(a, b, reference).leaves if not leaf.passed]
    assert bad == [(2, key)]


def test_rows_counts_and_start_must_be_exact_even_with_a_reference():
    reference = as_float64(make_trace())
    for step, key in [(1, "batch/blocks/0/w"), (0, "parameters/blocks/0/w"), (2, "counts/step")]:
        a, b = noisy(reference, 1), noisy(reference, 2)
        flat = b[step][key].reshape(-1).view(np.uint8)
        flat[0] ^= 1
        first = compare(a, b, reference).first_bad
        assert (first.step, first.name, first.max_ulp) == (step, key, 1)


def test_a_reference_of_another_run_is_not_accepted():
    reference = as_float64(make_trace())
    a, b = noisy(reference, 1), noisy(reference, 2)
    other_start = copy(reference)
    other_start[0]["parameters/blocks/0/w"] += 1e-9
    assert "the reference holds other values" in compare(a, b, other_start).first_bad.reason
    other_steps = [reference[0], *as_float64(make_trace(seed=5))[1:]]
    for step, honest in zip(other_steps, reference):
        step |= {key: x for key, x in honest.items() if key.startswith(("batch", "counts"))}
    assert "too far for rounding in float32" in compare(a, b, other_steps).first_bad.reason
    incomplete = copy(reference)
    del incomplete[1]["norm"]
    assert "the reference does not have it" in compare(a, b, incomplete).first_bad.reason
    spoiled = copy(reference)
    spoiled[1]["norm"] = np.float64(np.nan)
    assert "the reference holds NaN" in compare(a, b, spoiled).first_bad.reason


def test_what_is_not_a_number_gets_a_verdict_whichever_side_has_it():
    honest = make_trace()
    reference = as_float64(honest)
    for spoiled in ([1.0, 2.0], np.array([{}, {}], object), np.zeros(3, np.complex64)):
        for place in ("a", "b", "reference", "noise", "start"):
            traces = {name: copy(reference if name == "reference" else noisy(reference, i)) for i, name in enumerate(("a", "b", "reference", "noise"))}
            name, step = ("a", 0) if place == "start" else (place, 1)
            traces[name][step]["parameters/blocks/0/w"] = spoiled
            found = compare(traces["a"], traces["b"], traces["reference"], [traces["noise"]])
            assert not found.equal and any(leaf.name == "parameters/blocks/0/w" and not leaf.passed for leaf in found.leaves), place


def test_numbers_at_the_ends_of_their_range_are_compared_as_others():
    for size in (1e-200, 1e155):
        reference = [{"parameters/w": np.zeros(5)}, {"parameters/w": np.full(5, size)}]
        a = [dict(step) for step in copy(reference)]
        b = copy(reference)
        b[1]["parameters/w"] *= 1.01
        assert not compare(a, b, reference).equal


def test_a_recording_that_ends_early_is_named():
    whole = make_trace()
    found = compare(copy(whole)[:2], whole)
    assert "extra: side A does not have it, it ends after 1 steps" in found.first_bad.reason
