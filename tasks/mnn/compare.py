"""Element-wise comparison of what an engine returned with what a reference returned.

One definition of "how far off" for parity, the conversion guard and the search for a diverging layer.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# float32 resolves 1.2e-7 of a value. Where an output varies by less than a hundredth of its own size, its
# range says more about rounding than about meaning, so a hundredth of its size is the yardstick.
_LEAST_SCALE_OF_SIZE = 1e-2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far one output is from its reference; infinite where no tolerance can admit the difference."""

    max_abs_error: float
    """Largest |got - want| in the output's own unit."""
    max_rel_error: float
    """`max_abs_error` divided by the range max(want) - min(want) of the finite reference values.

    The divisor is at least a hundredth of max |want|; for a constant reference it is |want|, and 1 if that
    is 0. Infinite for different shapes, NaN or infinity in different places, and unequal integers.
    """
    cosine: float
    """Cosine of the angle between the two as vectors: 1 for equal, 0 where undefined."""
    finite_count: int
    """Reference elements that are numbers; 0 means that nothing was proven."""
    reason: str = ""
    """Why the difference is infinite; empty when it is not."""

    def to_dict(self) -> dict[str, float | int | str]:
        """A JSON-able record: infinity becomes the largest float, so thresholds still compare rightly."""
        return {k: sys.float_info.max if v == math.inf else v for k, v in asdict(self).items()}


_EQUAL_NOTHING = Comparison(max_abs_error=0.0, max_rel_error=0.0, cosine=1.0, finite_count=0)


def compare(got: Array, want: Array) -> Comparison:
    """Compare one output with its reference.

    Floating-point references are compared within a range, see `Comparison.max_rel_error`: NaN equals NaN and
    infinity equals infinity of the same sign. Integer and boolean references (class indices, masks) are
    right or wrong: any difference has an infinite relative error. Integer widths may differ, shapes may not.

    Args:
        got: What the engine returned, any shape.
        want: The reference, the same shape; its dtype decides whether the comparison is exact.

    Returns:
        The comparison; two empty arrays of one shape are equal.
    """
    if got.shape != want.shape:
        return _incomparable(f"shape {got.shape}, expected {want.shape}")
    if got.dtype.kind not in "biuf" or want.dtype.kind not in "biuf":
        return _incomparable(f"dtype {got.dtype}, expected {want.dtype}: not real numbers")
    if want.size == 0:
        return _EQUAL_NOTHING
    if want.dtype.kind in "biu":
        return _compare_exact(got, want)
    got_f64, want_f64 = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    finite = np.isfinite(want_f64)
    # Outside `finite`, NaN must meet NaN and infinity its equal; inside, `got` must be finite too.
    if not np.array_equal(got_f64[~finite], want_f64[~finite], equal_nan=True):
        return _incomparable("NaN or infinity expected, but not returned", finite_count=int(finite.sum()))
    got_f64, want_f64 = got_f64[finite], want_f64[finite]
    if not np.isfinite(got_f64).all():
        return _incomparable("NaN or infinity returned, but not expected", finite_count=int(finite.sum()))
    return _compare_finite(got_f64, want_f64)


def combine(comparisons: Iterable[Comparison]) -> Comparison:
    """The worst of several comparisons: largest errors, smallest cosine, first reason, counts added up."""
    parts = list(comparisons)
    if not parts:
        return _EQUAL_NOTHING
    return Comparison(
        max_abs_error=max(p.max_abs_error for p in parts),
        max_rel_error=max(p.max_rel_error for p in parts),
        cosine=min(p.cosine for p in parts),
        finite_count=sum(p.finite_count for p in parts),
        reason=next((p.reason for p in parts if p.reason), ""),
    )


def _incomparable(reason: str, *, finite_count: int = 0) -> Comparison:
    return Comparison(
        max_abs_error=math.inf, max_rel_error=math.inf, cosine=0.0, finite_count=finite_count, reason=reason
    )


def _compare_exact(got: Array, want: Array) -> Comparison:
    different = int((got != want).sum())
    if different == 0:
        return Comparison(max_abs_error=0.0, max_rel_error=0.0, cosine=1.0, finite_count=want.size)
    got_f64, want_f64 = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    if not np.isfinite(got_f64).all():
        return _incomparable("NaN or infinity returned, but integers expected", finite_count=want.size)
    # Integers beyond 2**53 can differ and still round to one float64: the difference is at least 1 then.
    error = float(np.abs(got_f64 - want_f64).max()) or 1.0
    return Comparison(
        max_abs_error=error,
        max_rel_error=math.inf,
        cosine=_cosine(got_f64, want_f64),
        finite_count=want.size,
        reason=f"{different} of {want.size} {want.dtype} values differ",
    )


def _compare_finite(got: npt.NDArray[np.float64], want: npt.NDArray[np.float64]) -> Comparison:
    if want.size == 0:
        return _EQUAL_NOTHING
    low, high = float(want.min()), float(want.max())
    size = max(abs(low), abs(high))
    scale = max(high - low, size * _LEAST_SCALE_OF_SIZE) if high > low else size or 1.0
    with np.errstate(over="ignore"):
        error = float(np.abs(got - want).max())
    if not math.isfinite(error) or not math.isfinite(scale):  # float64 values of opposite sign near its limit
        if error == 0:
            return Comparison(max_abs_error=0.0, max_rel_error=0.0, cosine=1.0, finite_count=want.size)
        return _incomparable("values too large to subtract in float64", finite_count=want.size)
    return Comparison(
        max_abs_error=error,
        max_rel_error=error / scale,
        cosine=_cosine(got, want),
        finite_count=want.size,
    )


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    size_a, size_b = float(np.abs(a).max()), float(np.abs(b).max())
    if size_a == 0 or size_b == 0:
        return 1.0 if size_a == size_b else 0.0
    a, b = a / size_a, b / size_b  # squares of tiny or huge values would leave float64
    cosine = float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
    return min(1.0, max(-1.0, cosine))
