"""Classes of devices with the latencies that were measured on them.

What is measured, and what is between the measurements:

- **mlperf** (phones, NPU): 0, 50, 90, 95, 99, 99.9 and 100 % of many single queries. Between two of them the
  logarithm of the latency is interpolated linearly.
- **ncnn** (boards and phones, CPU, MobileNetV3-Large in fp32, the fastest of the settings that were
  measured): minimum, mean and maximum of a few runs. The latency is min + (max - min) u^k with u uniform: of
  the curves of this form exactly one has the mean that was measured.
- **qai** (phones and kits, NPU, MobileNetV3-Small): one number, taken for the median. The spread around it
  is the median phone's of mlperf: an assumption.
- **Tiers**: by the class's median latency at HIGH_BELOW_MS and LOW_FROM_MS. The sources measure different
  models on different units, so that this is a guess, as a device's own is.
- **Shares**: SHARE_OF_TIER, equally divided within a tier: an assumption, the recordings are no census.
- **Heat**: `Throttle`, an assumption; see there.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError
from fleet.device.release import Tier
from fleet.simulator.traces import MLPERF_QUANTILES, MlperfRow, NcnnRow, QaiRow, Telemetry

Source = Literal["mlperf", "ncnn", "qai", "made_up"]
HIGH_BELOW_MS, LOW_FROM_MS = 15.0, 50.0
SHARE_OF_TIER: Mapping[Tier, float] = {"high": 0.2, "mid": 0.5, "low": 0.3}
_TASKS = (
    "mobilenetEdgeTPU",
    "image_classification-performance",
    "mobilenetV4",
    "image_classification_v2-performance",
)
"""Image classification in MLPerf, the smaller network first."""
_NCNN_MODEL, _QAI_MODEL = "mobilenet_v3", "mobilenet_v3_small"
_QAI_ORDER = (("float", "tflite"), ("float", "qnn_dlc"), ("float", "onnx"), ("w8a16", "qnn_dlc"))
_NO_EDGE_DEVICE = re.compile(
    r"azure|aws|epyc|threadripper|xeon|desktop|kunpeng|hyper-v|ryzen|macbook|loongson [23][ak][3-6]"
    r"|phytium ft|sunway|celeron|core™",
    re.IGNORECASE,
)
"""Servers and desks among the devices of ncnn."""


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """How much slower a hot device is.

    1 up to `begins_c`, then a straight line to `factor` at `full_c`, and no more. An assumption, made to meet
    what was seen in the field: 30 ms at 28 degrees were 120 ms at 45. It is not in the recorded phone trace:
    that phone's clock stood at 2208 MHz at 47 to 50 degrees.
    """

    begins_c: float = 38.0
    full_c: float = 45.0
    factor: float = 4.0

    def slowdown(self, temperature_c: float | None) -> float:
        """At least 1; 1 where no temperature is known."""
        if temperature_c is None:
            return 1.0
        way = (temperature_c - self.begins_c) / (self.full_c - self.begins_c)
        return 1.0 + (self.factor - 1.0) * min(1.0, max(0.0, way))


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """A distribution by quantiles, log-linear in between."""

    at: tuple[float, ...]
    """From 0 to 1."""
    ms: tuple[float, ...]

    def sample(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        """`size` latencies in ms."""
        return np.asarray(np.exp(np.interp(rng.random(size), self.at, np.log(self.ms))), np.float64)

    @property
    def median_ms(self) -> float:
        """In the middle."""
        return float(np.exp(np.interp(0.5, self.at, np.log(self.ms))))


@dataclass(frozen=True, kw_only=True)
class Range:
    """A distribution by minimum, mean and maximum."""

    min_ms: float
    mean_ms: float
    max_ms: float

    @property
    def exponent(self) -> float:
        """The k of u^k, whose mean is 1 / (k + 1)."""
        width = self.max_ms - self.min_ms
        return width / max(self.mean_ms - self.min_ms, width * 1e-3) - 1.0 if width > 0 else 0.0

    def sample(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        """`size` latencies in ms."""
        powers = np.asarray(rng.random(size) ** self.exponent, np.float64)
        return self.min_ms + (self.max_ms - self.min_ms) * powers

    @property
    def median_ms(self) -> float:
        """In the middle."""
        return float(self.min_ms + (self.max_ms - self.min_ms) * 0.5**self.exponent)


@dataclass(frozen=True, kw_only=True)
class DeviceClass:
    """One kind of device."""

    name: str
    """Unique; what such a device calls its model."""
    soc: str
    source: Source
    latency: Quantiles | Range
    """Cool."""
    tier: Tier
    share: float = 0.0
    """Of the fleet; all together 1."""
    throttle: Throttle = field(default_factory=Throttle)

    def latency_ms(
        self, rng: np.random.Generator, temperature_c: float | None = None, size: int = 1
    ) -> npt.NDArray[np.float64]:
        """`size` latencies at a temperature; the same for the same generator state."""
        return self.latency.sample(rng, size) * self.throttle.slowdown(temperature_c)


def device_classes(telemetry: Telemetry) -> tuple[DeviceClass, ...]:
    """Every class in the recordings, in order of names.

    Raises:
        UserError: there is none of one of the tiers.
    """
    classes = [*_of_mlperf(telemetry.mlperf), *_of_ncnn(telemetry.ncnn)]
    classes += _of_qai(telemetry.qai, _relative_spread(telemetry.mlperf))
    members = {tier: [c for c in classes if c.tier == tier] for tier in SHARE_OF_TIER}
    if missing := [tier for tier, inside in members.items() if not inside]:
        raise UserError(
            f"recordings without a device of tier {', '.join(missing)}",
            allowed="devices of every tier",
            next_step="give the path of the whole telemetry.tar",
        )
    shared = [replace(c, share=SHARE_OF_TIER[c.tier] / len(members[c.tier])) for c in classes]
    return tuple(sorted(_unique(shared), key=lambda c: c.name))


def pick(classes: Sequence[DeviceClass], rng: np.random.Generator, count: int) -> list[DeviceClass]:
    """`count` devices by the shares of their classes."""
    shares = np.array([c.share for c in classes])
    return [classes[int(index)] for index in rng.choice(len(classes), count, p=shares / shares.sum())]


def tier_of(median_ms: float) -> Tier:
    """The guess from a median latency."""
    if median_ms < HIGH_BELOW_MS:
        return "high"
    return "mid" if median_ms < LOW_FROM_MS else "low"


def _made(name: str, soc: str, source: Source, latency: Quantiles | Range) -> DeviceClass:
    return DeviceClass(name=name, soc=soc, source=source, latency=latency, tier=tier_of(latency.median_ms))


def _of_mlperf(rows: Sequence[MlperfRow]) -> list[DeviceClass]:
    """One a phone and SoC, with its first task in the order of _TASKS."""
    wanted = sorted((row for row in rows if row.task in _TASKS), key=lambda row: _TASKS.index(row.task))
    first: dict[tuple[str, str], MlperfRow] = {}
    for row in wanted:
        first.setdefault((row.phone, row.soc), row)
    return [
        _made(row.phone, row.soc, "mlperf", Quantiles(at=MLPERF_QUANTILES, ms=row.latencies_ms))
        for row in first.values()
    ]


def _of_ncnn(rows: Sequence[NcnnRow]) -> list[DeviceClass]:
    """One a device, with the fastest setting of its CPU."""
    best: dict[str, NcnnRow] = {}
    for row in rows:
        if row.model != _NCNN_MODEL or row.gpu or _NO_EDGE_DEVICE.search(row.device):
            continue
        if row.device not in best or row.mean_ms < best[row.device].mean_ms:
            best[row.device] = row
    return [
        _made(
            _short(device), device, "ncnn", Range(min_ms=row.min_ms, mean_ms=row.mean_ms, max_ms=row.max_ms)
        )
        for device, row in best.items()
    ]


def _of_qai(rows: Sequence[QaiRow], spread: tuple[float, ...]) -> list[DeviceClass]:
    """One a device, with the first of _QAI_ORDER."""
    ranked = sorted(
        (row for row in rows if row.model == _QAI_MODEL and (row.precision, row.runtime) in _QAI_ORDER),
        key=lambda row: _QAI_ORDER.index((row.precision, row.runtime)),
    )
    first: dict[str, QaiRow] = {}
    for row in ranked:
        first.setdefault(row.device, row)
    return [
        _made(
            row.device,
            row.device,
            "qai",
            Quantiles(at=MLPERF_QUANTILES, ms=tuple(row.latency_ms * times for times in spread)),
        )
        for row in first.values()
    ]


def _relative_spread(rows: Sequence[MlperfRow]) -> tuple[float, ...]:
    """Each quantile over the median, of the median phone."""
    ratios = [[ms / row.latencies_ms[1] for ms in row.latencies_ms] for row in rows if row.task in _TASKS]
    return tuple(float(value) for value in np.median(np.array(ratios), axis=0)) if ratios else (1.0,) * 7


def _short(device: str) -> str:
    """A device's name without what stands in brackets: `Raspberry Pi 4 Model B Broadcom BCM2711B0`."""
    return re.sub(r"\s+", " ", re.split(r"[(,]", device)[0]).strip()[:64]


def _unique(classes: Iterable[DeviceClass]) -> list[DeviceClass]:
    """Names that occur twice get a number."""
    seen: dict[str, int] = {}
    found = []
    for one in classes:
        seen[one.name] = seen.get(one.name, 0) + 1
        number = seen[one.name]
        found.append(one if number == 1 else replace(one, name=f"{one.name} #{number}"))
    return found
