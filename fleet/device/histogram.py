"""Exponential histograms: distributions that merge by adding counts, so a fleet's percentiles are one sum.

The form is that of OpenTelemetry's metrics data model (ExponentialHistogram) at the fixed scale 4: bucket
i holds values in (BASE**i, BASE**(i + 1)], BASE = 2**(2**-SCALE).
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

SCALE = 4
BASE = 2 ** (2**-SCALE)
RELATIVE_ERROR = (BASE - 1) / (BASE + 1)
"""At most this far, relatively, is a quantile from a value that was recorded: 2.2 %."""
MOST_BUCKETS = 1024
"""In one histogram and sign: 64 powers of two, 19 decades."""
_MOST_COUNT = 2**53
"""Larger counts are not exact in every JSON parser."""

_PER_OCTAVE = 2**SCALE
_SMALLEST, _LARGEST = sys.float_info.min, sys.float_info.max
"""Magnitudes below the smallest normal double have no bucket: there a double itself is not that exact."""
_LOWEST_INDEX = _PER_OCTAVE * (sys.float_info.min_exp - 1) - 1
_HIGHEST_INDEX = _PER_OCTAVE * sys.float_info.max_exp - 1


def _bounds() -> npt.NDArray[np.float64]:
    """The largest doubles that are not above 2**(k / 16), k = 0..15.

    By integers, because the nearest double may lie above the bound and would then count as below it.
    """
    roots = []
    for k in range(_PER_OCTAVE):
        power = 1 << (k + 52 * _PER_OCTAVE)  # of 2**(k / 16) * 2**52
        for _ in range(SCALE):
            power = math.isqrt(power)
        roots.append(power / 2**52)
    return np.array(roots)


_BOUNDS = _bounds()


def bucket_index(magnitudes: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The bucket of each positive normal double; exact, also on the bounds."""
    half, exponent = np.frexp(magnitudes)
    within = np.searchsorted(_BOUNDS, half * 2, side="left")
    indexes: npt.NDArray[np.int64] = _PER_OCTAVE * (exponent.astype(np.int64) - 1) + within - 1
    return indexes


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """What is known of some finite values; never empty: without values there is no histogram."""

    count: int
    sum: float
    """Of all values; the largest double where it would overflow."""
    min: float
    max: float
    zero_count: int = 0
    """Values that are 0, or too near to it to have a bucket."""
    offset: int = 0
    """Bucket index of the first of `counts`."""
    counts: tuple[int, ...] = ()
    """Of positive values, bucket by bucket; neither the first nor the last is 0."""
    negative_offset: int = 0
    negative_counts: tuple[int, ...] = ()
    """Of negative values, by their absolute value."""

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Self | None:
        """The histogram of finite values of any shape; None of no values.

        Raises:
            ValueError: a value is NaN or infinite.
        """
        array = np.asarray(values, dtype=np.float64).ravel()
        if array.size == 0:
            return None
        if not np.isfinite(array).all():
            raise ValueError("NaN or infinite values have no place in a histogram; count them apart")
        offset, counts = _counted(array[array >= _SMALLEST])
        negative_offset, negative_counts = _counted(-array[array <= -_SMALLEST])
        return cls(
            count=array.size,
            sum=_sum(array.tolist()),
            min=float(array.min()) + 0.0,  # no -0.0: which zero is the smallest would depend on the order
            max=float(array.max()) + 0.0,
            zero_count=array.size - sum(counts) - sum(negative_counts),
            offset=offset,
            counts=counts,
            negative_offset=negative_offset,
            negative_counts=negative_counts,
        )

    @property
    def mean(self) -> float:
        """Of all values."""
        return self.sum / self.count

    def quantile(self, q: float) -> float:
        """The value at rank ceil(q * count), as near as the buckets tell.

        It is within RELATIVE_ERROR of the recorded value of that rank, and exact for the smallest and the
        largest; a value without a bucket is taken for 0.

        Raises:
            ValueError: q is outside 0..1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile of {q}: 0 to 1 exist")
        rank = max(1, math.ceil(round(q * self.count, 6)))  # 0.07 * 100 is a little more than 7
        if rank in (1, self.count):
            return self.min if rank == 1 else self.max
        return min(max(self._value_at(rank), self.min), self.max)

    def _value_at(self, rank: int) -> float:
        below = 0
        for place in range(len(self.negative_counts) - 1, -1, -1):
            below += self.negative_counts[place]
            if rank <= below:
                return -_middle(self.negative_offset + place)
        below += self.zero_count
        if rank <= below:
            return 0.0
        for place, count in enumerate(self.counts):
            below += count
            if rank <= below:
                return _middle(self.offset + place)
        raise AssertionError("the counts sum to `count`")

    def check(self) -> None:
        """Refuse what no values could have given; for histograms from elsewhere.

        Raises:
            ValueError: with the field and what is wrong.
        """
        _require(0 < self.count <= _MOST_COUNT, f"count is {self.count}")
        for name in ("sum", "min", "max"):
            _require(math.isfinite(getattr(self, name)), f"{name} is {getattr(self, name)}")
        _require(self.min <= self.max, f"min {self.min} is above max {self.max}")
        _require(self.zero_count >= 0, f"zero_count is {self.zero_count}")
        _check_side("counts", self.offset, self.counts)
        _check_side("negative_counts", self.negative_offset, self.negative_counts)
        total = self.zero_count + sum(self.counts) + sum(self.negative_counts)
        _require(total == self.count, f"the buckets hold {total} values, count says {self.count}")
        _require(_top_fits(self), f"max {self.max} does not lie in the last bucket")
        _require(_top_fits(self._mirrored()), f"min {self.min} does not lie in the first bucket")
        slack = 1e-9 * max(abs(self.min), abs(self.max))
        fits = self.min - slack <= self.mean <= self.max + slack or abs(self.sum) == _LARGEST
        _require(fits, f"sum {self.sum} of {self.count} values is not between their min and max")

    def _mirrored(self) -> Self:
        return replace(
            self,
            min=-self.max,
            max=-self.min,
            offset=self.negative_offset,
            counts=self.negative_counts,
            negative_offset=self.offset,
            negative_counts=self.counts,
        )


def merged(histograms: Iterable[Histogram | None]) -> Histogram | None:
    """The histogram of all their values together; None when there are none.

    It is the one that `Histogram.of` makes of the pooled values, but for the rounding of `sum`.
    """
    parts = [part for part in histograms if part is not None]
    if not parts:
        return None
    offset, counts = _added([(part.offset, part.counts) for part in parts])
    negative_offset, negative_counts = _added(
        [(part.negative_offset, part.negative_counts) for part in parts]
    )
    count = sum(part.count for part in parts)
    return Histogram(
        count=count,
        sum=_sum([part.sum for part in parts]),
        min=min(part.min for part in parts),
        max=max(part.max for part in parts),
        zero_count=count - sum(counts) - sum(negative_counts),
        offset=offset,
        counts=counts,
        negative_offset=negative_offset,
        negative_counts=negative_counts,
    )


def _counted(magnitudes: npt.NDArray[np.float64]) -> tuple[int, tuple[int, ...]]:
    """Offset and counts of positive values; those too far below the largest are left out."""
    if magnitudes.size == 0:
        return 0, ()
    indexes = bucket_index(magnitudes)
    indexes = indexes[indexes > indexes.max() - MOST_BUCKETS]
    offset = int(indexes.min())
    return offset, tuple(np.bincount(indexes - offset).tolist())


def _added(sides: list[tuple[int, tuple[int, ...]]]) -> tuple[int, tuple[int, ...]]:
    """Offset and counts of several sides together; what is too far below the largest is left out."""
    filled = [(offset, counts) for offset, counts in sides if counts]
    if not filled:
        return 0, ()
    end = max(offset + len(counts) for offset, counts in filled)
    offset = max(min(offset for offset, _ in filled), end - MOST_BUCKETS)
    total = [0] * (end - offset)
    for first, counts in filled:
        for place, count in enumerate(counts, first - offset):
            if place >= 0:
                total[place] += count
    leading = next(place for place, count in enumerate(total) if count)
    return offset + leading, tuple(total[leading:])


def _sum(values: list[float]) -> float:
    """The sum, rounded once, so that no order of the values gives another; the largest double at most."""
    try:
        return math.fsum(values) + 0.0
    except OverflowError:  # of a partial sum, or of the sum itself
        scaled = math.fsum(math.ldexp(value, -64) for value in values)
        return (
            math.copysign(_LARGEST, scaled) if abs(scaled) > math.ldexp(_LARGEST, -64) else scaled * 2.0**64
        )


def _middle(index: int) -> float:
    """The value that is relatively equally far from both ends of a bucket."""
    octave, within = divmod(index + 1, _PER_OCTAVE)
    return math.ldexp(2 ** (within / _PER_OCTAVE) * 2 / (BASE + 1), octave)


def _index(magnitude: float) -> int:
    return int(bucket_index(np.array([magnitude]))[0])


def _top_fits(histogram: Histogram) -> bool:
    """Whether `max` lies in the bucket of the largest values."""
    top, counts = histogram.max, histogram.counts
    if counts:
        return top >= _SMALLEST and _index(top) == histogram.offset + len(counts) - 1
    negative = top <= -_SMALLEST
    if histogram.zero_count:
        too_near = negative and bool(histogram.negative_counts) and _index(-top) < histogram.negative_offset
        return abs(top) < _SMALLEST or too_near
    return negative and _index(-top) == histogram.negative_offset


def _check_side(name: str, offset: int, counts: tuple[int, ...]) -> None:
    _require(len(counts) <= MOST_BUCKETS, f"{name} has {len(counts)} buckets, {MOST_BUCKETS} are allowed")
    if not counts:
        _require(offset == 0, f"the offset of no {name} is {offset}")
        return
    _require(min(counts) >= 0, f"{name} holds {min(counts)}")
    _require(counts[0] > 0 and counts[-1] > 0, f"the first or last of {name} is 0")
    within = offset >= _LOWEST_INDEX and offset + len(counts) - 1 <= _HIGHEST_INDEX
    _require(within, f"{name} begins at bucket {offset}: doubles have {_LOWEST_INDEX} to {_HIGHEST_INDEX}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"histogram: {otherwise}")
