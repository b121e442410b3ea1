"""Whether a latency may be believed: reasons why not, each a key of `fleet.lab.flags.FLAGS`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fleet.device.bench import RawRun
from fleet.lab.schedule import is_noisy, pooled_ms

MIN_QUERIES_P99 = 459
"""Fewer samples give no upper bound of P99 at 99 % confidence."""
MAX_MEMORY_SHARE = 0.7
"""Of the available memory; beyond it an app is among the first that a phone ends."""

_BLOCKS = 12
_FEWEST_IN_A_BLOCK = 5
_MAX_RISE = 0.1
_MIN_TAU = 0.7
"""Kendall's tau of 12 blocks with time: chance exceeds it once in about 1,500, a single step rarely."""
_MIN_CLOCK_KEPT = 0.85


def flags_of(runs: Sequence[RawRun]) -> tuple[str, ...]:
    """Every doubt about the pooled latency of one job's runs, in the order they were made."""
    doubts = {
        "noisy": is_noisy(runs),
        "throttled": is_throttled(runs),
        "unstable_warmup": not all(run.warmup_stable for run in runs),
        "too_few_queries": sum(len(run.latency_ms) for run in runs) < MIN_QUERIES_P99,
    }
    return tuple(name for name, doubted in doubts.items() if doubted)


def is_throttled(runs: Sequence[RawRun]) -> bool:
    """Whether the latency rose steadily, in one run or over all, or the clock fell while one ran."""
    clocks = [(run.clock_before_mhz, run.clock_after_mhz) for run in runs]
    return (
        rises(pooled_ms(runs))
        or any(rises(np.asarray(run.latency_ms)) for run in runs)
        or any(before and after and after < _MIN_CLOCK_KEPT * before for before, after in clocks)
    )


def rises(latency_ms: npt.NDArray[np.float64]) -> bool:
    """Whether latencies in the order they were measured go up by 10 %, and steadily.

    Medians of 12 blocks stand for the samples: an interruption is no trend.
    """
    if len(latency_ms) < _BLOCKS * _FEWEST_IN_A_BLOCK:
        return False
    medians = np.array([np.median(block) for block in np.array_split(latency_ms, _BLOCKS)])
    quarter = _BLOCKS // 4
    rise = np.median(medians[-quarter:]) / np.median(medians[:quarter]) - 1
    earlier, later = np.triu_indices(_BLOCKS, k=1)
    tau = np.sign(medians[later] - medians[earlier]).mean()
    return bool(rise > _MAX_RISE and tau >= _MIN_TAU)
