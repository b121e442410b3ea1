"""Recordings of real phones and boards, read out of one tar in memory: nothing is ever extracted.

    telemetry/mlperf_mobile_latency.csv           percentiles of many queries, phones (MLCommons, Apache-2.0)
    telemetry/ncnn_benchmark.csv                  min, average, max of a few runs, boards (ncnn, BSD-3)
    telemetry/qai_hub_models_perf.csv             one latency, phones and kits (Qualcomm AI Hub, BSD-3)
    telemetry/phone_trace_galaxy_c7pro_1s.csv     25 minutes of one phone, a row a second (MIT)

The tar is no part of the repository; its path is the user's to give.
"""

import csv
import io
import math
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.device.degrade.sensors_trace import TracePoint, parse_trace
from fleet.device.errors import UserError

_MLPERF, _NCNN = "telemetry/mlperf_mobile_latency.csv", "telemetry/ncnn_benchmark.csv"
_QAI, _PHONE = "telemetry/qai_hub_models_perf.csv", "telemetry/phone_trace_galaxy_c7pro_1s.csv"
_MOST_BYTES = 16 << 20
_MOST_MEMBERS = 1_000
MLPERF_QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Of the latencies in a row of MLPerf."""
_NS_COLUMNS = ("min_ns", "p50_ns", "p90_ns", "p95_ns", "p99_ns", "p999_ns", "max_ns")


@dataclass(frozen=True, kw_only=True)
class MlperfRow:
    """One submission: a task on a phone, one query after the other."""

    phone: str
    soc: str
    task: str
    latencies_ms: tuple[float, ...]
    """At MLPERF_QUANTILES."""
    mean_ms: float


@dataclass(frozen=True, kw_only=True)
class NcnnRow:
    """A few runs of a model on one device."""

    device: str
    threads: int
    gpu: bool
    runs: int
    model: str
    min_ms: float
    mean_ms: float
    max_ms: float


@dataclass(frozen=True, kw_only=True)
class QaiRow:
    """One measurement of a model on one device."""

    device: str
    model: str
    precision: str
    runtime: str
    latency_ms: float


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """All of it."""

    mlperf: tuple[MlperfRow, ...]
    ncnn: tuple[NcnnRow, ...]
    qai: tuple[QaiRow, ...]
    phone: tuple[TracePoint, ...]


def read_telemetry(path: Path) -> Telemetry:
    """Everything in the tar.

    Raises:
        UserError: it is missing, no such tar, or one of its tables is not what it should be.
    """
    texts = _texts(path)
    try:
        return Telemetry(
            mlperf=tuple(_mlperf(_rows(texts[_MLPERF]))),
            ncnn=tuple(_ncnn(_rows(texts[_NCNN]))),
            qai=tuple(_qai(_rows(texts[_QAI]))),
            phone=parse_trace(texts[_PHONE].splitlines(), name=f"{path}: {_PHONE}"),
        )
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise _wrong(f"{path}: {type(error).__name__} {error}") from error


def _texts(path: Path) -> dict[str, str]:
    """The four tables by name, read in memory; other members are not looked at, links are not followed."""
    found: dict[str, str] = {}
    try:
        with tarfile.open(path) as tar:
            for number, member in enumerate(tar):
                if number >= _MOST_MEMBERS:
                    raise _wrong(f"{path}: more than {_MOST_MEMBERS} members")
                if member.name not in (_MLPERF, _NCNN, _QAI, _PHONE) or not member.isreg():
                    continue
                file = tar.extractfile(member)
                if file is None or member.size > _MOST_BYTES:
                    raise _wrong(f"{path}: {member.name} of {member.size} bytes")
                found[member.name] = file.read(_MOST_BYTES).decode("utf-8")
    except (OSError, tarfile.TarError, UnicodeDecodeError, EOFError) as error:
        raise _wrong(f"{path}: {error}") from error
    return found


def _wrong(got: str) -> UserError:
    return UserError(
        got,
        allowed=f"a tar with {_MLPERF}, {_NCNN}, {_QAI} and {_PHONE}",
        next_step="give the path of telemetry.tar",
    )


def _rows(text: str) -> Iterator[Mapping[str, str]]:
    yield from csv.DictReader(io.StringIO(text))


def _mlperf(rows: Iterator[Mapping[str, str]]) -> Iterator[MlperfRow]:
    """Single queries on phones; batches (offline) have one time for all, and some systems are no phones."""
    for row in rows:
        latencies_ms = tuple(int(row[column]) / 1e6 for column in _NS_COLUMNS)
        single = "offline" not in row["task"].lower() and row["scenario"] == "SingleStream"
        if not (single and row["phone"] and row["soc"]):
            continue
        if not 0 < latencies_ms[0] <= latencies_ms[-1] or list(latencies_ms) != sorted(latencies_ms):
            raise ValueError(f"latencies of {row['phone']} do not grow")
        yield MlperfRow(
            phone=row["phone"],
            soc=row["soc"],
            task=row["task"].partition("/")[0],
            latencies_ms=latencies_ms,
            mean_ms=int(row["mean_ns"]) / 1e6,
        )


def _ncnn(rows: Iterator[Mapping[str, str]]) -> Iterator[NcnnRow]:
    """Rows whose mean lies between minimum and maximum: in a few of the tables people sent in it does not."""
    for row in rows:
        low, mean, high = (float(row[column]) for column in ("min_ms", "avg_ms", "max_ms"))
        if not (0 < low <= mean <= high and math.isfinite(high)):
            continue
        yield NcnnRow(
            device=row["device"],
            threads=int(row["num_threads"]),
            gpu=row["gpu_device"] != "-1",
            runs=int(row["loop_count"]),
            model=row["model"],
            min_ms=low,
            mean_ms=mean,
            max_ms=high,
        )


def _qai(rows: Iterator[Mapping[str, str]]) -> Iterator[QaiRow]:
    """Jobs that passed."""
    for row in rows:
        if row["job_status"] == "Passed" and row["inference_ms"]:
            latency_ms = float(row["inference_ms"])
            if not (latency_ms > 0 and math.isfinite(latency_ms)):
                raise ValueError(f"inference_ms {row['inference_ms']} of {row['model']} on {row['device']}")
            yield QaiRow(
                device=row["device"],
                model=row["model"],
                precision=row["precision"],
                runtime=row["runtime"],
                latency_ms=latency_ms,
            )
