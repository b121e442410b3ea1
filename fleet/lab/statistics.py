"""Percentiles that say how sure they are: distribution-free order-statistic bounds.

For independent samples the r-th smallest of n is an upper confidence bound of the quantile q when
P(Binomial(n, q) < r) >= confidence (David & Nagaraja, Order Statistics, 7.1): no assumption on the shape.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr  # scipy.stats takes seconds to import

CONFIDENCE = 0.99


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper confidence bound of a percentile."""

    value: float | None
    """The bound in the samples' unit; None when there are too few samples for any bound."""
    rank: int | None
    """Which order statistic it is, 1 = smallest."""
    n: int


def upper_bound(samples: npt.NDArray[np.float64], quantile: float, confidence: float = CONFIDENCE) -> Bound:
    """The smallest order statistic that bounds `quantile` from above with `confidence`.

    At 99 % confidence the maximum of 44, 90 and 459 samples bounds P90, P95 and P99.
    """
    n = len(samples)
    # bdtr(k, n, q) = P(Bin(n, q) <= k); the first k that reaches the confidence gives rank k + 1.
    rank = int(np.searchsorted(bdtr(np.arange(n), n, quantile), confidence)) + 1
    if rank > n:
        return Bound(value=None, rank=None, n=n)
    return Bound(value=float(np.partition(samples, rank - 1)[rank - 1]), rank=rank, n=n)
