"""Measuring on this host: each run in a fresh process, one run at a time on the machine."""

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from fleet.device.engine import RuntimeConfig
from fleet.device.errors import EngineError
from fleet.device.preprocess import Preprocess
from fleet.lab.child import Limits, run_child
from fleet.lab.statistics import Bound, upper_bound

MIN_CPU_SHARE = 0.9
"""Below this share of a core the process was interrupted too often for its latency to mean anything."""
MAX_P95_TO_P50 = 1.5
"""A quiet host repeats one computation within a few per cent; beyond this ratio something else ran."""
MIN_QUERIES_P99 = 459
"""Fewer samples give no upper bound of P99 at 99 % confidence."""
_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one model costs on one device in one runtime config."""

    engine_version: str
    config: Mapping[str, str | int]
    n: int
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    p95_bound: Bound
    p99_bound: Bound
    load_ms: float
    first_ms: float
    end_to_end_p50_ms: float | None
    """Camera frame to class; None when no preprocess record was given."""
    load_memory_mb: float | None
    peak_memory_mb: float | None
    cpu_share: float
    flags: tuple[str, ...]
    """Reasons why the latency is not valid: noisy, too_few_queries; empty when it is."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return asdict(self)


def device_lock() -> FileLock:
    """The lock that keeps two measurements off this host at the same time, across processes."""
    return FileLock(Path(tempfile.gettempdir()) / "edgeloop-device-local.lock")


def run_once(
    model: Path, config: RuntimeConfig, *, queries: int, preprocess: Preprocess | None = None, seed: int = 0
) -> dict[str, Any]:
    """One run of `fleet.device.bench` in a fresh process; its raw result.

    Raises:
        EngineError: the process crashed, hung, or the model does not run.
    """
    command = [sys.executable, "-m", "fleet.device.bench", str(model)]
    command += ["--config", json.dumps(config.to_dict()), "--queries", str(queries), "--seed", str(seed)]
    if preprocess:
        command += ["--preprocess", json.dumps(preprocess.to_dict())]
    # No limit of memory: a GPU's driver reserves more addresses than there is memory.
    ended = run_child(command, timeout_s=_TIMEOUT_S, limits=Limits(memory_bytes=None))
    if ended.failure:
        last = "\n".join(ended.stderr.strip().splitlines()[-5:])
        raise EngineError(f"benchmark of {model.name} {ended.failure}", engine_said=last)
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def summarize(runs: Sequence[Mapping[str, Any]]) -> Measurement:
    """Pool the samples of several runs of one model in one config; keep every doubt as a flag."""
    latency_ms = np.concatenate([np.asarray(run["latency_ms"], np.float64) for run in runs])
    end_to_end = np.concatenate([np.asarray(run["end_to_end_ms"], np.float64) for run in runs])
    p50, p90, p95, p99 = (float(q) for q in np.percentile(latency_ms, [50, 90, 95, 99]))
    cpu_share = float(min(run["cpu_share"] for run in runs))
    noisy = cpu_share < MIN_CPU_SHARE or p95 > MAX_P95_TO_P50 * p50
    too_few = len(latency_ms) < MIN_QUERIES_P99
    return Measurement(
        engine_version=str(runs[0]["engine_version"]),
        config=runs[0]["config"],
        n=len(latency_ms),
        p50_ms=p50,
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        max_ms=float(latency_ms.max()),
        p95_bound=upper_bound(latency_ms, 0.95),
        p99_bound=upper_bound(latency_ms, 0.99),
        load_ms=float(np.median([run["load_ms"] for run in runs])),
        first_ms=float(np.median([run["first_ms"] for run in runs])),
        end_to_end_p50_ms=float(np.median(end_to_end)) if len(end_to_end) else None,
        load_memory_mb=_max_or_none([run["load_memory_mb"] for run in runs]),
        peak_memory_mb=_max_or_none([run["peak_memory_mb"] for run in runs]),
        cpu_share=cpu_share,
        flags=(*(("noisy",) if noisy else ()), *(("too_few_queries",) if too_few else ())),
    )


def _max_or_none(values: Sequence[float]) -> float | None:
    return None if any(math.isnan(v) for v in values) else float(max(values))


def measure(
    model: Path,
    config: RuntimeConfig | None = None,
    *,
    queries: int = 500,
    preprocess: Preprocess | None = None,
    seed: int = 0,
) -> Measurement:
    """Measure one model on this host, alone; waits for another measurement to end."""
    with device_lock():
        return summarize(
            [run_once(model, config or RuntimeConfig(), queries=queries, preprocess=preprocess, seed=seed)]
        )


def measure_interleaved(
    models: Mapping[str, tuple[Path, Preprocess | None]],
    config: RuntimeConfig,
    *,
    queries: int,
    rounds: int,
    seed: int,
) -> dict[str, Measurement]:
    """Measure several models in alternating order (ABBA ...), so that slow drift of the host cancels.

    Args:
        models: Name to (model file, preprocess record for end-to-end time).
        config: The runtime config of every run.
        queries: Timed inferences per model, split over the rounds.
        rounds: Passes over the models; every second one in reverse order.
        seed: Seed of the input data.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    per_round = math.ceil(queries / rounds)
    with device_lock():
        for index in range(rounds):
            order = list(models) if index % 2 == 0 else list(models)[::-1]
            for name in order:
                path, preprocess = models[name]
                runs[name].append(run_once(path, config, queries=per_round, preprocess=preprocess, seed=seed))
    return {name: summarize(results) for name, results in runs.items()}
