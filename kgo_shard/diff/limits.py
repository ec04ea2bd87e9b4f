"""How far two sides may differ, and why: the only file where a number that bounds an error may stand.

Where the arithmetic is the same, the limit is zero: equal bits. Everywhere else the three-way bound holds: both sides are
compared with a float64 run of the same steps, and the new side's error may be at most FACTOR times the old side's.

    error of x   =  ||x - reference|| / scale                  one number for each leaf of each step (Euclidean norms)
    limit        =  FACTOR * old error
    old error    =  the largest of   the old side's error in this leaf
                                     its error there in runs in which only rounding was changed (the noise floor)
                                     what its errors in the other leaves of the stage make one expect of a leaf of this size
                                     the rounding of the result itself

Nothing here depends on the new side, and nothing is chosen to make a test pass.
"""

from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import ml_dtypes
import numpy as np

FACTOR = 2

EXACT_STAGES = frozenset({"batch", "counts"})
CHANGE_STAGES = frozenset({"parameters", "ema"})
GRADIENT_STAGE = "reduced_gradient"
NORM_STAGES = frozenset({"norm", "clip"})
SCHEDULE_STAGES = frozenset({"learning_rate"})
FEW_LEAVES = 8


class Limit(NamedTuple):
    """One row of the table of limits, as the reports print it."""

    name: str
    limit: str
    reason: str


LIMITS = (
    Limit(
        "equal bits",
        "0",
        "The same arithmetic in the same order gives the same bits; a leaf that differs is a finding, however small.",
    ),
    Limit(
        "start state and the stages " + ", ".join(sorted(EXACT_STAGES)),
        "0, also under the three-way bound",
        "Nothing is computed there: a start is copied from the tape, rows are copied from files, counts are integers. The "
        "reference must start from the same numbers too, or its distance from the old side would not be a rounding error.",
    ),
    Limit(
        "three-way bound",
        f"{FACTOR} x the old side's error against float64",
        "FlashAttention's rule. Two honest computations that round differently have errors of one size, so their quotient is "
        "near 1; 2 leaves room for that, and none for a wrong term, which is wrong in any precision. The old side sets the "
        "scale, not us.",
    ),
    Limit(
        "scale of the stages " + ", ".join(sorted(CHANGE_STAGES)),
        "||reference - start||",
        "A step changes a weight by a thousandth of its size, so a wholly wrong update would be a small error of the value. "
        "The error is measured against all that training changed since the start.",
    ),
    Limit(
        "scale of all other stages",
        "||reference||",
        "They are computed afresh in each step (or from zero, the moments), so their own size is the size of what may be wrong.",
    ),
    Limit(
        "noise floor",
        "the old side's error in a run of its own from parameters that are one unit in the last place off",
        "How far rounding carries a leaf depends on the leaf: a bias's gradient adds 2592 terms that cancel to a hundredth, and Adam's first "
        "update, g / (|g| + 1e-8), makes of 1e-11 in an element of 1e-8 a thousandth of a whole update. The old side's own error is one "
        "draw of that; a run from a start that is as good, for numbers that are rounded anyway, is another.",
    ),
    Limit(
        "rounding of the result",
        "half a unit in the last place x ||reference||",
        "Even the exact result is rounded when it is stored. An old error below that is luck (the value lay near a "
        "representable one) and promises nothing for another computation. The old side's dtype counts.",
    ),
    Limit(
        "expected error of a leaf of the stage",
        "median x scatter of the old side's relative errors over the stage's leaves, x chance(elements)",
        "A leaf's error is one draw. In three cases of ten a scalar's error exceeds twice an independent second one, with "
        "nothing wrong. The leaves of a stage share the arithmetic, so together they tell how large a draw can be: the largest "
        "that is expected once among as many leaves as are compared. Median and median deviation (of the logarithms), because "
        "a leaf whose terms nearly cancel has a relative error thousands of times the others', and a mean would lend it to all.",
    ),
    Limit(
        "unit of the expected error",
        "the leaf's scale, its noise run's error, or in "
        + ", ".join(sorted(CHANGE_STAGES))
        + " the rounding of its result: that in which the old side's errors scatter least",
        "Leaves of one stage may differ by more than chance. Muon's updates go through bfloat16 and are off by a hundredth beside AdamW's "
        "that are off by a millionth; of bfloat16 weights storing rounds away the more the larger they are, of a norm's weight all. As "
        "parts of the changes such errors scatter over powers of ten, and one limit wide enough for all would let pass a wrong weight. "
        f"Of fewer than {FEW_LEAVES} leaves a scatter says nothing: there the scale is the unit.",
    ),
    Limit(
        "leaves in which the old side has no correct digit",
        "the size of the stage's largest elements x the expected error; in "
        + ", ".join(sorted(CHANGE_STAGES))
        + " the size itself",
        "In exact arithmetic such a leaf is zero (the gradient of a bias under a softmax): both sides hold noise, and noise "
        "differs by more than a factor. Its terms cancel, but they may be as large as those of any other leaf, and so may their "
        "rounding. Adam and Muon make updates of full size from gradients of any size, so noise moves such a weight as far as "
        "signal moves the others.",
    ),
    Limit(
        "the old side itself, in each stage",
        "median of the relative errors: the root of half a unit in the last place of the coarsest dtype of the computation",
        "A new side and a float64 run that share a mistake (another learning rate, say) agree, and a limit of twice the old side's "
        "distance would let both pass. So the old side must be a rounded version of the reference: half its digits at least. In "
        + ", ".join(sorted(CHANGE_STAGES))
        + " what storing the weights may have rounded away, once a step, does not count. One leaf alone may be worse: its terms cancel.",
    ),
    Limit(
        "stages " + ", ".join(sorted(NORM_STAGES)),
        "as above, or where that is larger: the old side's error of the whole reduced gradient, or the expected rounding of the sum",
        "One scalar has no stage to be typical of, but | ||g|| - ||r|| | <= ||g - r||: what the gradient's limit allows, the "
        "norm must be allowed, and the clip factor is c / norm. Besides, a sum of n positive terms is off by about sqrt(n) units of "
        "rounding, the root of it by half of that (Higham and Mary 2019), and another compiler adds in another order.",
    ),
    Limit(
        "stage " + ", ".join(sorted(SCHEDULE_STAGES)),
        "as above, from the old side's errors at this step and all steps before",
        "One scalar again, but a pure function of the step count: no error accumulates in it, so its errors at all steps are "
        "draws of one size. No other stage looks back: a relative error that cancellation made large once would excuse that "
        "leaf for ever.",
    ),
    Limit(
        "matrix: parameters in bfloat16, on one device without pmap or with the state split",
        "the three-way bound, also in exact mode",
        "The original has no reduction there, and XLA may use a gradient before it is rounded to bfloat16. shard_map over a mesh of "
        "one device has its reduction in between, so the norm, the clip and SGD take the rounded gradient. Likewise it may add up gradients "
        "before they are rounded, and not where they are cut into shares first. With pmap, also over one device, and the state whole, or "
        "with float32 parameters, bits are equal; so they are where XLA is told to leave no rounding out (--xla_allow_excess_precision=false).",
    ),
)


def is_float(dtype: np.dtype) -> bool:
    """True for NumPy's and ml_dtypes' real floating types of up to 64 bits (bfloat16 has NumPy kind "V", so the kind does not tell)."""
    if dtype.kind == "c" or dtype.itemsize > 8:
        return False
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def norm(x: np.ndarray) -> float:
    """Euclidean norm of all elements, in float64."""
    flat = np.asarray(x, np.float64).reshape(-1)
    largest = float(np.abs(flat).max(initial=0.0))
    if not 0 < largest < np.inf:
        return largest
    flat = flat / largest  # squares of very large or small elements would leave the range
    return largest * float(np.sqrt(np.einsum("i,i->", flat, flat)))  # np.linalg.norm would start BLAS threads for every leaf


def scale_of(stage: str, reference: np.ndarray, start: np.ndarray | None) -> float:
    """The norm that an error of this leaf is measured against; 0 only where the reference is all zeros.

    `start` is the same leaf of the reference's start state, None where the start state does not have it. A leaf that has
    not moved since the start (a step with learning rate 0) is measured against its value.
    """
    if stage in CHANGE_STAGES and start is not None and start.shape == reference.shape:
        change = norm(np.asarray(reference, np.float64) - np.asarray(start, np.float64))
        if change > 0:
            return change
    return norm(reference)


def relative(error_norm: float, scale: float) -> float:
    """`error_norm` as a part of `scale`; the absolute error where the scale is 0."""
    return error_norm / scale if scale > 0 else error_norm


def rounding_error(reference: np.ndarray, dtype: np.dtype) -> float:
    """Largest norm of the error of storing `reference` in `dtype`: half a unit in the last place of every element."""
    return float(ml_dtypes.finfo(dtype).eps) / 2 * norm(reference)


def one_in(comparisons: int) -> float:
    """The standard normal draw that is exceeded once among `comparisons` draws, on average."""
    return NormalDist().inv_cdf(1 - 1 / max(comparisons, 2))


def chance(size: int, comparisons: int) -> float:
    """Root mean square of `size` standard normal draws that one among `comparisons` such leaves exceeds; never below 1.

    This is sqrt(chi2 quantile / size), by Wilson and Hilferty's formula: 3.8 for a scalar among 4000 leaves, near 1 for a matrix.
    """
    spread = 2 / (9 * size)
    return max(1.0, (1 - spread + one_in(comparisons) * spread**0.5) ** 1.5)


def coarser(a: np.dtype, b: np.dtype) -> np.dtype:
    """That of two floating-point dtypes which has fewer digits."""
    return max(a, b, key=lambda dtype: float(ml_dtypes.finfo(dtype).eps))


def half_the_digits(dtype: np.dtype) -> float:
    """The relative error of a number that has half the digits of `dtype`."""
    return (float(ml_dtypes.finfo(dtype).eps) / 2) ** 0.5


def typical_error(errors: Iterable[float]) -> float:
    """Median of a stage's relative errors; 0 if there is none. Exact leaves (zeros, counts) do not say how large errors are."""
    positive = [error for error in errors if error > 0]
    return float(np.median(positive)) if positive else 0.0


def units(stage: str) -> tuple[str, ...]:
    """What the errors of a stage's leaves may be proportional to."""
    return ("scale", "rounding", "noise") if stage in CHANGE_STAGES else ("scale", "noise")


def scatter(errors: Iterable[float]) -> float:
    """Standard deviation of the logarithms of a stage's relative errors, told from their median deviation; 0 if there are none."""
    logs = np.log([error for error in errors if error > 0])
    if not len(logs):
        return 0.0
    # The median deviation of normal draws is their standard deviation times the normal's upper quartile.
    return float(np.median(np.abs(logs - np.median(logs))) / NormalDist().inv_cdf(0.75))


def expected_error(errors: Sequence[float], comparisons: int) -> float:
    """The largest relative error expected of a large leaf among `comparisons`, told from the errors of its stage's leaves."""
    return typical_error(errors) * float(np.exp(one_in(comparisons) * scatter(errors)))


def whole_error(error_norms: Iterable[float], scales: Iterable[float]) -> float:
    """Relative error of all leaves of a stage taken as one vector."""
    return relative(norm(np.array(list(error_norms))), norm(np.array(list(scales))))


def norm_rounding(sizes: Sequence[int], dtype: np.dtype) -> float:
    """Expected relative error of the Euclidean norm of leaves of these sizes, summed in each leaf and then over the leaves.

    Half of sqrt(n) u: the probabilistic bound of a sum's rounding, with its constant 1 (Higham and Mary, A new approach to
    probabilistic rounding error analysis, 2019, theorem 2.4).
    """
    terms = max(sizes) + len(sizes) if sizes else 0
    return terms**0.5 * float(ml_dtypes.finfo(dtype).eps) / 4


def old_error(own: float, noise: float, expected: float, rounding: float) -> float:
    """The old side's error in one leaf: its `own`, its `noise` runs', the one `expected` in the stage, the `rounding` of the result."""
    return max(own, noise, expected, rounding)


def limit_for(old: float) -> float:
    """The error that the new side may have where the old side has `old`."""
    return FACTOR * old


def summation_limit(roundings: int, magnitude: float, dtype: np.dtype) -> float:
    """Bound of the error of a result that passes through `roundings` roundings, in any order.

    `magnitude` is the sum of the absolute values of the terms. The classical bound n u / (1 - n u) with u = half a unit in
    the last place of 1 (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    unit = roundings * float(ml_dtypes.finfo(dtype).eps) / 2
    return unit / (1 - unit) * magnitude
