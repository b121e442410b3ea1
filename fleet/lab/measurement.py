"""What one model costs in one runtime config: the runs of a job, pooled and judged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fleet.device.bench import RawRun
from fleet.device.engine import RuntimeConfig
from fleet.lab.schedule import pooled_ms
from fleet.lab.statistics import Bound, upper_bound
from fleet.lab.validity import MAX_MEMORY_SHARE, flags_of


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one model costs on one device in one runtime config; None: not exposed there."""

    engine_version: str
    config: Mapping[str, str | int]
    inputs: Mapping[str, list[int]]
    n: int
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    p90_bound: Bound
    p95_bound: Bound
    p99_bound: Bound
    round_p50_ms: tuple[float, ...]
    """Median of each fresh process, in the order they ran."""
    load_ms: float
    first_ms: float
    """First inference in a fresh process; like `load_ms` the median of the processes."""
    end_to_end_p50_ms: float | None
    """Camera frame to class; None when no preprocess record was given."""
    throughput_per_s: float
    """Inferences a second, one after the other."""
    load_memory_mb: float | None
    peak_memory_mb: float | None
    available_memory_mb: float | None
    memory_share: float | None
    """Peak over available."""
    cpu_share: float
    """CPU time over wall time times threads, lowest of the runs."""
    load_avg_1min: float
    temp_before_c: float | None
    temp_after_c: float | None
    energy_mj: float | None
    """CPU packages per inference, whatever else they did included."""
    flags: tuple[str, ...]
    """Reasons why the latency is not valid, see `fleet.lab.flags`; empty when it is."""
    warnings: tuple[str, ...]

    def beside_latency(self) -> dict[str, float | None]:
        """What is told of a measurement in every report, under the same names; latencies have theirs."""
        return {
            "load_ms": self.load_ms,
            "first_ms": self.first_ms,
            "end_to_end_p50_ms": self.end_to_end_p50_ms,
            "throughput_per_s": self.throughput_per_s,
            "load_memory_mb": self.load_memory_mb,
            "available_memory_mb": self.available_memory_mb,
            "cpu_share": self.cpu_share,
            "load_avg_1min": self.load_avg_1min,
            "temp_before_c": self.temp_before_c,
            "temp_after_c": self.temp_after_c,
            "energy_mj": self.energy_mj,
        }


def summarize(runs: Sequence[RawRun]) -> Measurement:
    """Pool the samples of several runs of one job; keep every doubt as a flag."""
    latency_ms = pooled_ms(runs)
    end_to_end_ms = [sample for run in runs for sample in run.end_to_end_ms]
    p50, p90, p95, p99 = (float(q) for q in np.percentile(latency_ms, [50, 90, 95, 99]))
    peak_mb = _most(run.peak_memory_mb for run in runs)
    available_mb = _least(run.available_memory_mb for run in runs)
    memory_share = peak_mb / available_mb if peak_mb is not None and available_mb else None
    return Measurement(
        engine_version=runs[0].engine_version,
        config=runs[0].config,
        inputs=runs[0].inputs,
        n=len(latency_ms),
        p50_ms=p50,
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        max_ms=float(latency_ms.max()),
        p90_bound=upper_bound(latency_ms, 0.90),
        p95_bound=upper_bound(latency_ms, 0.95),
        p99_bound=upper_bound(latency_ms, 0.99),
        round_p50_ms=tuple(float(np.median(run.latency_ms)) for run in runs),
        load_ms=float(np.median([run.load_ms for run in runs])),
        first_ms=float(np.median([run.first_ms for run in runs])),
        end_to_end_p50_ms=float(np.median(end_to_end_ms)) if end_to_end_ms else None,
        throughput_per_s=len(latency_ms) / sum(run.steady_s for run in runs),
        load_memory_mb=_most(run.load_memory_mb for run in runs),
        peak_memory_mb=peak_mb,
        available_memory_mb=available_mb,
        memory_share=memory_share,
        cpu_share=min(run.cpu_share for run in runs),
        load_avg_1min=max(run.load_avg_1min for run in runs),
        temp_before_c=runs[0].temp_before_c,
        temp_after_c=runs[-1].temp_after_c,
        energy_mj=_most(run.energy_mj for run in runs),
        flags=flags_of(runs),
        warnings=("memory",) if memory_share is not None and memory_share > MAX_MEMORY_SHARE else (),
    )


def config_name(config: RuntimeConfig) -> str:
    """A config in the reports: threads-precision-memory, e.g. t1-normal-normal."""
    return f"t{config.threads}-{config.precision}-{config.memory}"


def _most(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def _least(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known, default=None)
