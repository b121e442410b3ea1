"""One output of the engine against its reference, in units of the output's range and of its parts' sizes.

`compare` takes one range for a whole output. Where an output holds parts of different size, such as boxes of
0..640 beside scores of 0..1, an error that would ruin the small part is nothing in units of the large one: so
each part is also measured by its own size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.mnn.compare import Comparison, compare

Array = npt.NDArray[Any]

_INFINITE = 1e30  # the engine writes large numbers where ONNX says infinity
_APART = 10.0  # sizes further apart than this are parts of their own
_ROUNDING = 1e-6  # of an output's size: what float32 leaves of its largest values in the small ones
_NOISE = 10.0
_UNIT, _LOSSY_SHARE, _FEWEST_LOSSY = 1.0, 0.1, 8


@dataclass(frozen=True, kw_only=True)
class Part:
    """How errors are measured along one axis of an output whose slices differ in size."""

    axis: int
    sizes: npt.NDArray[np.float64]
    """One for each index of the axis, shaped to broadcast over the output."""
    noise_factor: float
    """Times the error of the largest slices: smaller sizes than that are noise. 0: nothing is."""

    def worst(self, got: Array, want: Array) -> tuple[float, str]:
        """The largest error in units of a slice's size, and which slice has it; both arrays of one shape."""
        got, want = got.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(want) & np.isfinite(got)
        error = np.abs(np.where(finite, got, 0.0) - np.where(finite, want, 0.0))
        largest = np.broadcast_to(self.sizes == self.sizes.max(), error.shape)
        sizes = np.maximum(self.sizes, self.noise_factor * float(error[largest].max()))
        relative = error / np.where(sizes > 0, sizes, np.inf)
        index = int(np.unravel_index(int(relative.argmax()), relative.shape)[self.axis])
        size = float(sizes.reshape(-1)[index])
        return float(relative.max()), f"index {index} of axis {self.axis}, in units of {size:.3g}"


def parts(wants: Sequence[Array], *, tolerance: float, lossy: bool) -> tuple[Part, ...]:
    """The axes along which an output's slices differ in size; mostly none.

    Slices whose sizes lie within a factor of 10 of the next larger one belong together and share the size of
    the largest: the logits of a classifier are one part, however they vary.

    Args:
        wants: References of one shape, for several inputs: one alone may be small by chance.
        tolerance: Largest relative error. A slice that float32 could not hold to it, by rounding of the large
            slices or by the error that these have anyway, is measured by a size that it can.
        lossy: Weights or activations are stored in fewer bits. Then a tenth of one, or of the whole output
            where that is less, is the smallest size: a probability that is always 0.001 may come out as 0.01.
            And slices of fewer than 8 numbers are no parts: the logits of a vector share one noise.
    """
    if not wants or wants[0].dtype.kind != "f" or wants[0].size == 0:
        return ()
    largest = np.max([_magnitudes(want) for want in wants], axis=0)
    whole = float(largest.max())
    least = _LOSSY_SHARE * min(whole, _UNIT) if lossy else _ROUNDING / tolerance * whole
    found = []
    for axis, extent in enumerate(largest.shape):
        others = tuple(i for i in range(largest.ndim) if i != axis)
        shared = _shared(largest.max(axis=others))
        fewest = _FEWEST_LOSSY if lossy else 1
        if shared.min() < whole and least < whole and largest.size >= fewest * extent:
            shape = [extent if i == axis else 1 for i in range(largest.ndim)]
            sizes = np.maximum(shared, least).reshape(shape)
            found.append(Part(axis=axis, sizes=sizes, noise_factor=0.0 if lossy else _NOISE / tolerance))
    return tuple(found)


def _magnitudes(want: Array) -> npt.NDArray[np.float64]:
    values = np.abs(want.astype(np.float64))
    return np.where(np.isfinite(values), values, 0.0)


def _shared(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each size replaced by the largest that is reached from it in steps of less than a factor of 10."""
    shared = sizes.copy()
    order = np.argsort(sizes)[::-1]
    for larger, smaller in pairwise(order):
        if sizes[smaller] * _APART > sizes[larger]:
            shared[smaller] = shared[larger]
    return shared


def compare_output(got: Array, want: Array, *, plain: bool, least_range: float = 0.0) -> Comparison:
    """`compare`, but with a share of differing elements for integers, and the engine's notion of infinity.

    Args:
        got: The engine's output.
        want: The reference's; where it is NaN nothing is compared.
        plain: Compare infinities too, not only numbers.
        least_range: What an error is measured in at least, where the output hardly varies for this input.
    """
    if got.shape != want.shape or want.dtype.kind not in "biuf" or got.dtype.kind not in "biuf":
        return compare(got, want)
    if want.dtype.kind in "biu":
        result = compare(got, want)
        share = float((got != want).mean()) if want.size else 0.0
        return Comparison(
            max_abs_error=result.max_abs_error,
            max_rel_error=share,
            cosine=1.0 - share,
            finite_count=result.finite_count,
            reason=result.reason,
        )
    got, want = got.astype(np.float64), want.astype(np.float64)
    skipped = np.isnan(want) | (np.isinf(want) & (not plain))
    agreed = np.isinf(want) & (np.abs(got) > _INFINITE) & (np.sign(want) == np.sign(got))
    result = compare(np.where(agreed, want, got)[~skipped], want[~skipped])
    if least_range > 0 and np.isfinite(result.max_rel_error):
        measured = min(result.max_rel_error, result.max_abs_error / least_range)
        result = replace(result, max_rel_error=measured)
    return result
