"""The profile of one model by layers: what took the time, and which layer has probably no fast kernel.

A layer that is 10 times slower than its peers lead to expect is reported. Big is not slow, and a small layer
costs at least its call: a peer with less work stands for a time in proportion to the work
(multiply-accumulates or elements, as the engine counts them), one with more work for its own time. Peers are
the layers of the same operator type and arithmetic with about as much work; where they are too few, the
nearest of that type; where the type is rare, the nearest of all whose work is counted alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet.device.profile import LayerTime
from fleet.lab.device import Device
from fleet.lab.schedule import Job

OUTLIER = 10.0
_PROFILED_RUNS = 50
_SIMILAR_WORK = 4.0
_FEWEST_PEERS, _NEAREST = 3, 5
_SHORTEST_MS = 1e-6
_LEAST_WORK_M = 1e-6  # one element; of some operators the engine counts nothing
_MIN_SHARE = 0.01  # less is no matter to anybody, and mostly the callback's own time
_MULTIPLY = frozenset(  # their work is counted in multiply-accumulates, that of all others in elements
    {
        "Convolution",
        "ConvolutionDepthwise",
        "Deconvolution",
        "DeconvolutionDepthwise",
        "MatMul",
        "BatchMatMul",
    }
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One operator that ran; a row of reports/benchmark/DEVICE_layers.csv."""

    layer: str
    op_type: str
    """As the engine ran it, e.g. Convolution, Raster, FloatToInt8."""
    int8: bool
    p50_ms: float
    share: float
    """Of the sum over all layers, 0..1."""
    outlier: bool
    why: str
    """What an outlier was compared with; empty for the others."""


def profile(device: Device, job: Job, *, seed: int = 0) -> list[Layer]:
    """The layers of one model on a device, in the order they ran; the caller holds the device's lock."""
    options = job.options() | {"runs": _PROFILED_RUNS, "seed": seed}
    answered: list[dict[str, Any]] = device.run("fleet.device.profile", options, model=job.model)
    return judge([LayerTime(**record) for record in answered])


def judge(times: Sequence[LayerTime]) -> list[Layer]:
    """Shares and outliers of profiled layers."""
    total_ms = sum(time.p50_ms for time in times)
    layers = []
    for index, time in enumerate(times):
        share = time.p50_ms / total_ms if total_ms > 0 else 0.0
        others = [*times[:index], *times[index + 1 :]]
        why = _why_slow(time, others) if share >= _MIN_SHARE else ""
        layers.append(
            Layer(
                layer=time.layer,
                op_type=time.op_type,
                int8=time.int8,
                p50_ms=time.p50_ms,
                share=share,
                outlier=bool(why),
                why=why,
            )
        )
    return layers


def _why_slow(time: LayerTime, others: Sequence[LayerTime]) -> str:
    """What the layer is 10 times slower than; empty when it is not, or when nothing compares."""
    peers, what = _peers(time, others)
    if len(peers) < _FEWEST_PEERS:
        return ""
    expected_ms = float(np.median([_expected_ms(time, peer) for peer in peers]))
    ratio = time.p50_ms / max(expected_ms, _SHORTEST_MS)
    return f"{ratio:.0f} times what {what} lead to expect" if ratio > OUTLIER else ""


def _peers(time: LayerTime, others: Sequence[LayerTime]) -> tuple[list[LayerTime], str]:
    by_nearness = sorted(others, key=lambda other: _factor(other, time))
    same = [o for o in by_nearness if (o.op_type, o.int8) == (time.op_type, time.int8)]
    similar = [o for o in same if _factor(o, time) <= _SIMILAR_WORK]
    if len(similar) >= _FEWEST_PEERS:
        return similar, f"{len(similar)} {time.op_type} layers with about as much work"
    if len(same) >= _FEWEST_PEERS:
        nearest = same[:_NEAREST]
        return nearest, f"the {len(nearest)} {time.op_type} layers nearest in work"
    alike = [o for o in by_nearness if (o.op_type in _MULTIPLY) == (time.op_type in _MULTIPLY)][:_NEAREST]
    return alike, f"the {len(alike)} layers of other types nearest in work"


def _factor(a: LayerTime, b: LayerTime) -> float:
    """How far two layers are apart in work, 1 or more."""
    low, high = sorted((max(a.work_m, _LEAST_WORK_M), max(b.work_m, _LEAST_WORK_M)))
    return high / low


def _expected_ms(time: LayerTime, peer: LayerTime) -> float:
    return peer.p50_ms * max(1.0, time.work_m / max(peer.work_m, _LEAST_WORK_M))
