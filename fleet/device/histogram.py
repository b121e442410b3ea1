"""Exponential histograms: distributions that merge by adding counts, so a fleet's percentiles are one sum.

The form is that of OpenTelemetry's metrics data model (ExponentialHistogram) at the fixed scale 4: bucket
i holds values in (BASE**i, BASE**(i + 1)], BASE = 2**(2**-SCALE).
"""

from dataclasses import dataclass

SCALE = 4
BASE = 2 ** (2**-SCALE)
RELATIVE_ERROR = (BASE - 1) / (BASE + 1)
"""At most this far, relatively, is a quantile from a value that was recorded: 2.2 %."""
MOST_BUCKETS = 1024
"""In one histogram and sign: 64 powers of two, 19 decades."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """What is known of some finite values; never empty: without values there is no histogram."""

    count: int
    sum: float
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
