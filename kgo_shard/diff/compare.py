"""Two recorded runs in, one verdict out: every leaf of every step is compared, and the first that fails is named.

This file knows only flat dicts of NumPy arrays. A trace is a list with one dict for each step; its first entry is the
start state. Keys are "<stage>/<leaf>", or "<stage>" alone where the stage is one array. Because nothing else is known about
the runs, the same comparison serves old against new, one device against eight, and one JAX version against another.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kgo_shard.diff import limits

# In the order in which they happen in a step: a fault shows first where it was made.
STAGES = (
    "batch",
    "loss_terms",
    "raw_gradient",
    "reduced_gradient",
    "norm",
    "clip",
    "learning_rate",
    "moments",
    "parameters",
    "ema",
    "moving_statistics",
    "metrics",
    "counts",
    "evaluation",
)

Step = dict[str, np.ndarray]
Trace = Sequence[Step]


class CompareError(ValueError):
    """There is nothing that could be compared, or only a thing with itself. The command exits with 2."""


class LeafResult(NamedTuple):
    """What was found out about one leaf of one step. A and B are the old and the new side."""

    step: int  # 0 is the start state
    stage: str
    leaf: str  # the name below the stage; "" where the stage is one array
    shape: tuple[int, ...]
    dtype: str
    equal_bits: bool
    max_ulp: int | None  # largest distance in units in the last place, or largest difference of integers; None: not comparable
    relative_norm: float | None  # ||b - a|| by the scale of limits.py, taken from A; the absolute norm where A is all zeros
    error_a: float | None  # relative error against the reference; None without one
    error_b: float | None
    limit: float | None  # None: equal bits are demanded
    x_of_limit: float | None  # error_b / limit
    passed: bool
    reason: str  # why it failed; "" if it passed

    @property
    def name(self) -> str:
        """The key in the trace."""
        return f"{self.stage}/{self.leaf}" if self.leaf else self.stage


@dataclass(frozen=True)
class Comparison:
    """All leaves, ordered by step, then stage, then name (blocks/2 before blocks/10)."""

    leaves: tuple[LeafResult, ...]
    steps: int  # steps after the start state
    has_reference: bool

    @property
    def equal(self) -> bool:
        """True if every leaf passed: equal bits, or within the three-way bound where there is a reference."""
        return all(leaf.passed for leaf in self.leaves)

    @property
    def first_bad(self) -> LeafResult | None:
        return next((leaf for leaf in self.leaves if not leaf.passed), None)

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def verdict(self) -> str:
        """One sentence."""
        bad = self.first_bad
        if bad is not None:
            stage = [leaf for leaf in self.leaves if (leaf.step, leaf.stage) == (bad.step, bad.stage)]
            failed = sum(not leaf.passed for leaf in self.leaves)
            where = f"step {bad.step}, stage {bad.stage}" + (f", leaf {bad.leaf}" if bad.leaf else "")
            return (
                f"DIFFERENT: first at {where}: {bad.reason}; {sum(not leaf.passed for leaf in stage)} of {len(stage)} leaves of "
                f"that stage and step differ, {failed} of {len(self.leaves)} in all"
            )
        count = f"{len(self.leaves)} leaves of {self.steps} steps and their start state"
        if not self.has_reference:
            return f"EQUAL: {count}, every bit"
        worst = max(self.leaves, key=lambda leaf: leaf.x_of_limit or 0.0)
        exact = sum(leaf.equal_bits for leaf in self.leaves)
        return (
            f"WITHIN LIMITS: {count}, {exact} of them equal in every bit; the largest error against the reference is "
            f"{worst.x_of_limit or 0.0:.2g} x of its limit (step {worst.step}, {worst.name})"
        )


def compare(
    trace_a: Trace,
    trace_b: Trace,
    reference: Trace | None = None,
    noise: Sequence[Trace] = (),
    coarsest: np.dtype | None = None,
    numbers: Sequence[int] | None = None,
) -> Comparison:
    """Compares side B (new) with side A (old).

    Without a reference every leaf must have the same shape, dtype and bits. With one (a float64 run of the same steps) the
    three-way bound of `limits.py` holds; `noise` are further runs of side A in which only rounding was changed, and show how far
    rounding can carry a leaf. `coarsest` is the dtype of the fewest digits that the computation goes through (default:
    that among side A's leaves, which do not show bfloat16 products); `numbers` are the steps after which the entries were kept
    (default: 0, 1, 2, ...). CompareError: an empty trace, or a side compared with itself.
    """
    traces = {"side A": trace_a, "side B": trace_b} | ({} if reference is None else {"the reference": reference})
    refuse_incomparable(traces | {f"noise run {i + 1}": trace for i, trace in enumerate(noise)})
    count = max(len(trace_a), len(trace_b))
    steps_a, steps_b, steps_reference, *steps_noise = ([*t, *([{}] * (count - len(t)))] for t in (trace_a, trace_b, reference or [], *noise))

    results = []
    numbers = range(count) if numbers is None else numbers
    comparisons = sum(len(step) for step in steps_a)
    for leaf in (x for step in steps_a for x in step.values() if is_array(x) and limits.is_float(x.dtype)):
        coarsest = leaf.dtype if coarsest is None else limits.coarser(leaf.dtype, coarsest)
    whole = Whole(comparisons, coarsest, {})
    for i in range(count):
        a, b = steps_a[i], steps_b[i]
        keys = sorted(a.keys() | b.keys(), key=flow_order)
        if not keys:
            results.append(failure(numbers[i], "", "this step holds no leaf on either side"))
        absent = {k: missing_reason(k, a, b, i, len(trace_a), len(trace_b)) for k in keys}
        found = {k: check_pair(numbers[i], k, a[k], b[k], array_of(steps_a[0], k)) for k in keys if not absent[k]}
        if reference is not None:
            found = check_errors(found, a, b, Yardstick(steps_reference[i], steps_reference[0], [t[i] for t in steps_noise]), whole)
        results += [found[k] if k in found else failure(numbers[i], k, absent[k]) for k in keys]
    return Comparison(tuple(results), numbers[-1], reference is not None)


# What is refused or fails before any number is looked at


def refuse_incomparable(traces: dict[str, Trace]) -> None:
    """CompareError if a trace is empty or if two of them are the same thing."""
    for name, trace in traces.items():
        if not any(trace):
            raise CompareError(f"nothing to compare: {name} holds no leaf")
    names = list(traces)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if same_memory(traces[first], traces[second]):
                raise CompareError(f"compared with itself: {first} and {second} are the same arrays")


def same_memory(trace_a: Trace, trace_b: Trace) -> bool:
    """True for one object, and for two whose common leaves all lie in the same memory (a shallow copy)."""
    if trace_a is trace_b:
        return True
    pairs = [(a[k], b[k]) for a, b in zip(trace_a, trace_b) for k in a.keys() & b.keys()]
    return bool(pairs) and all(x is y or (is_array(x) and is_array(y) and np.shares_memory(x, y)) for x, y in pairs)


def missing_reason(key: str, a: Step, b: Step, step: int, steps_a: int, steps_b: int) -> str:
    """Why this leaf cannot be compared at all; "" if it can."""
    if split_key(key)[0] not in STAGES:
        return f"unknown stage, not one of {', '.join(STAGES)}"
    if key not in b:
        return "missing on side B" + (f", which ends after {steps_b - 1} steps" if step >= steps_b else "")
    if key not in a:
        return "extra: side A does not have it" + (f", it ends after {steps_a - 1} steps" if step >= steps_a else "")
    return ""


def failure(step: int, key: str, reason: str) -> LeafResult:
    stage, leaf = split_key(key)
    return LeafResult(step, stage, leaf, (), "", False, None, None, None, None, None, None, False, reason)


def split_key(key: str) -> tuple[str, str]:
    stage, _, leaf = key.partition("/")
    return stage, leaf


def flow_order(key: str) -> tuple:
    """Sorts by stage as in a step, then by name with numbers as numbers. Unknown stages come last."""
    stage, leaf = split_key(key)
    order = STAGES.index(stage) if stage in STAGES else len(STAGES)
    # Digits and text alternate after the split, so that like is always compared with like.
    return order, stage, [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]+)", leaf)]


# Two sides


def check_pair(step: int, key: str, a: np.ndarray, b: np.ndarray, start: np.ndarray | None) -> LeafResult:
    """Compares two arrays by their bits. `start` is side A's leaf in the start state."""
    if reason := unusable_reason(a, b):
        return failure(step, key, reason)
    equal = equal_bits(a, b)
    ulp = 0 if equal else max_distance(a, b)
    scale = 0.0 if equal else limits.scale_of(key.partition("/")[0], a, start)
    difference = 0.0 if equal else limits.relative(limits.norm(as_float64(b) - as_float64(a)), scale)
    if equal:
        reason = ""
    elif limits.is_float(a.dtype):
        reason = f"relative norm {difference:.3g}, {ulp} ulp"
    else:
        reason = f"integers differ by up to {ulp}"
    found = failure(step, key, reason)
    return found._replace(
        shape=a.shape, dtype=str(a.dtype), equal_bits=equal, max_ulp=ulp, relative_norm=difference, passed=equal
    )


def unusable_reason(a: np.ndarray, b: np.ndarray) -> str:
    """Why no bits and no bound could make this leaf pass; "" if some could."""
    for side, x in (("A", a), ("B", b)):
        if not is_array(x):
            return f"side {side} holds a {type(x).__name__}, not a NumPy array"
        if not (limits.is_float(x.dtype) or is_integer(x.dtype)):
            return f"side {side} is of dtype {x.dtype}, neither a float nor an integer"
    if a.shape != b.shape:
        return f"shape {a.shape} against {b.shape}"
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} against {b.dtype}"
    if a.size == 0:
        return f"empty: shape {a.shape}"
    bad = [f"{int(np.sum(~np.isfinite(x)))} on side {side}" for side, x in (("A", a), ("B", b)) if not all_finite(x)]
    return f"NaN or infinite elements: {', '.join(bad)} of {a.size}" if bad else ""


def is_array(x: object) -> bool:
    return isinstance(x, np.ndarray | np.generic)


def array_of(step: Step, key: str) -> np.ndarray | None:
    return step[key] if is_array(step.get(key)) else None


def is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iub"


def all_finite(x: np.ndarray) -> bool:
    return is_integer(x.dtype) or bool(np.isfinite(x).all())


def as_float64(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two arrays of one shape and dtype hold the same bytes: +0 and -0 differ, a NaN equals its copy."""
    return bool(np.array_equal(as_bytes(a), as_bytes(b)))


def as_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def max_distance(a: np.ndarray, b: np.ndarray) -> int:
    """Largest distance between elements of two arrays of one dtype: floats in units in the last place, integers as numbers."""
    x, y = (ordered_integers(z) if limits.is_float(z.dtype) else widest(z) for z in (a, b))
    # As unsigned numbers the difference cannot overflow.
    return int((np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)).max())


def ordered_integers(x: np.ndarray) -> np.ndarray:
    """Floats as integers of their size in the same order, neighbours one apart; both zeros become 0."""
    bits = np.ascontiguousarray(x).reshape(-1).view(f"i{x.dtype.itemsize}")
    lowest = -(2 ** (8 * x.dtype.itemsize - 1))  # the bits of -0
    return np.where(bits < 0, lowest - bits, bits)


def widest(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).reshape(-1).astype(np.uint64 if x.dtype.kind == "u" else np.int64)


# Three sides


class Errors(NamedTuple):
    """Norms of one leaf's errors against the reference, all absolute; `scale` makes them relative."""

    a: float
    b: float
    noise: float  # the largest of side A's noise runs
    scale: float
    rounding: float  # of the result
    storing: float  # of weights in the dtype that they are kept in, once: a moving average inherits it
    size: int

    @property
    def relative_a(self) -> float:
        return limits.relative(self.a, self.scale)

    @property
    def unresolved(self) -> bool:
        """True if side A, or a noise run of it, has no correct digit in this leaf."""
        worst = max(self.a, self.noise)
        return worst > 0 and worst >= self.scale


class Level(NamedTuple):
    """How large side A's errors are in one stage of one step."""

    typical: float  # median of the relative errors, without what storing the weights rounds away
    expected: float  # the largest error expected of a leaf with many elements, in the unit that the next field names
    unit: str  # "scale", "rounding" or "noise": the field of Errors
    element: float  # root mean square of the elements (of their change) in that leaf with a correct digit where it is largest


class Yardstick(NamedTuple):
    """What side A's and side B's leaves of one step are held against."""

    reference: Step
    start: Step  # of the reference
    noise: Sequence[Step]  # that step of every noise run


class Whole(NamedTuple):
    """What one step's judgement needs of all steps."""

    comparisons: int  # leaves
    coarsest: np.dtype | None  # the dtype of fewest digits
    past: dict[str, list[float]]  # stage -> side A's relative errors so far, for the stages that may look back; brought up to date


def check_errors(found: dict[str, LeafResult], a: Step, b: Step, against: Yardstick, whole: Whole) -> dict[str, LeafResult]:
    """Judges the leaves of one step by the three-way bound instead of by their bits."""
    reference, start, noise = against
    comparisons, coarsest, past = whole
    results, errors = dict(found), {}
    weights = [x.dtype for key, x in a.items() if split_key(key)[0] in limits.CHANGE_STAGES and is_array(x) and limits.is_float(x.dtype)]
    kept_in = functools.reduce(limits.coarser, weights, np.dtype(np.float64))
    for key, result in found.items():
        if result.max_ulp is None:
            continue  # it has failed already
        if reason := unusable_reference(result, reference.get(key)):
            results[key] = result._replace(passed=False, reason=reason)
        elif result.step == 0 or result.stage in limits.EXACT_STAGES or not limits.is_float(a[key].dtype):
            if result.passed and not np.array_equal(as_float64(a[key]), as_float64(reference[key])):
                reason = "the reference holds other values, though nothing is computed here"
                results[key] = result._replace(passed=False, reason=reason)
        else:
            runs = [run.get(key) for run in noise]
            if all(is_array(x) and limits.is_float(x.dtype) and x.shape == a[key].shape and all_finite(x) for x in runs):
                errors[key] = measure(result.stage, a[key], b[key], reference[key], array_of(start, key), runs, kept_in)
            else:
                results[key] = result._replace(passed=False, reason="a noise run does not have it, in another shape, or not finite")

    by_stage: dict[str, list[Errors]] = {}
    for key, error in errors.items():
        by_stage.setdefault(found[key].stage, []).append(error)
    step = max((result.step for result in found.values()), default=0)
    levels = {stage: stage_level(stage, group, past.setdefault(stage, []), comparisons, step) for stage, group in by_stage.items()}
    gradient = by_stage.get(limits.GRADIENT_STAGE, [])
    gradient_error = limits.whole_error([e.a for e in gradient], [e.scale for e in gradient])
    for key, error in errors.items():
        stage = found[key].stage
        level = levels[stage]
        expected = level.expected * limits.chance(error.size, comparisons)
        if stage in limits.NORM_STAGES:
            expected = max(expected, gradient_error, limits.norm_rounding([e.size for e in gradient], a[key].dtype))
        if error.unresolved:
            expected = (1.0 if stage in limits.CHANGE_STAGES else expected) * level.element * error.size**0.5
        else:
            expected *= getattr(error, level.unit)
        results[key] = with_errors(found[key], error, limits.limit_for(limits.old_error(error.a, error.noise, expected, error.rounding)))
        if level.typical > limits.half_the_digits(coarsest):
            reason = (
                f"side A is {level.typical:.2g} from the reference in the middle of this stage, too far for rounding in {coarsest}: "
                "is the reference a float64 run of the same steps?"
            )
            results[key] = results[key]._replace(passed=False, reason=reason)
        if stage in limits.SCHEDULE_STAGES:
            past[stage].append(error.relative_a)
    return results


def stage_level(stage: str, group: list[Errors], past: list[float], comparisons: int, step: int) -> Level:
    """Told from the errors of the stage's leaves, and from `past` ones where the stage looks back."""
    unstored = [max(0.0, e.a - step * e.storing) / e.scale for e in group if e.scale]
    in_unit = {unit: [e.a / getattr(e, unit) for e in group if getattr(e, unit)] for unit in limits.units(stage)}
    in_unit["scale"] += past
    # A leaf without noise (there may be no noise run) could not be judged by it.
    usable = [unit for unit in in_unit if len(in_unit[unit]) >= len(in_unit["scale"]) and (unit == "scale" or len(group) >= limits.FEW_LEAVES)]
    unit = min(usable, key=lambda unit: limits.scatter(in_unit[unit]))
    expected = limits.expected_error(in_unit[unit], comparisons)
    element = max((e.scale / e.size**0.5 for e in group if not e.unresolved), default=0.0)
    return Level(float(np.median(unstored)) if unstored else 0.0, expected, unit, element)


def unusable_reference(result: LeafResult, reference: np.ndarray | None) -> str:
    """Why the reference cannot judge this leaf; "" if it can."""
    if reference is None:
        return "the reference does not have it"
    if not (is_array(reference) and (limits.is_float(reference.dtype) or is_integer(reference.dtype))):
        return "the reference holds something that is not an array of numbers"
    if reference.shape != result.shape:
        return f"shape {result.shape}, but the reference has {reference.shape}"
    return "" if all_finite(reference) else "the reference holds NaN or infinite elements"


def measure(
    stage: str,
    a: np.ndarray,
    b: np.ndarray,
    reference: np.ndarray,
    start: np.ndarray | None,
    noise: Sequence[np.ndarray],
    kept_in: np.dtype,
) -> Errors:
    exact = as_float64(reference)
    return Errors(
        limits.norm(as_float64(a) - exact),
        limits.norm(as_float64(b) - exact),
        max((limits.norm(as_float64(x) - exact) for x in noise), default=0.0),
        limits.scale_of(stage, exact, start),
        limits.rounding_error(exact, a.dtype),
        limits.rounding_error(exact, kept_in) if stage in limits.CHANGE_STAGES else 0.0,
        a.size,
    )


def with_errors(result: LeafResult, error: Errors, limit: float) -> LeafResult:
    """`result` judged by its errors. The limit is 0 only where the reference and side A are zero, and then B must be zero."""
    x_of_limit = error.b / limit if limit else (0.0 if error.b == 0 else float("inf"))
    passed = x_of_limit <= 1
    return result._replace(
        error_a=error.relative_a,
        error_b=limits.relative(error.b, error.scale),
        limit=limits.relative(limit, error.scale),
        x_of_limit=x_of_limit,
        passed=passed,
        reason="" if passed else f"{x_of_limit:.3g} x of limit, relative norm {result.relative_norm:.3g}, {result.max_ulp} ulp",
    )
