"""Initial steps from calibration data: how wide each tensor's int8 range has to be."""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import fx

from fleet.device.errors import UserError
from tasks.nn.fakequant import Q_MAX, ActivationQuantizer
from tasks.nn.float_run import FloatRun

Observer = Literal["max_abs", "percentile", "mse"]
Batches = Callable[[], Iterator[torch.Tensor]]
"""Starts a pass over the calibration images, float32 [N, 3, H, W] each."""

_BINS = 2048
_PERCENTILE = 99.99
_CANDIDATES = 64
"""Clipping points tried between 1/64 of the largest value and the largest."""


class _Histogram:
    """Distribution of |x| over everything one quantiser sees."""

    def __init__(self, largest: float) -> None:
        self.largest = largest
        self.counts = torch.zeros(_BINS, dtype=torch.float64)

    def add(self, x: torch.Tensor) -> None:
        self.counts += torch.histc(x.abs().float(), _BINS, 0, self.largest).double()

    @property
    def centres(self) -> torch.Tensor:
        return (torch.arange(_BINS, dtype=torch.float64) + 0.5) * (self.largest / _BINS)


@torch.no_grad()
def calibrate(graph_module: fx.GraphModule, batches: Batches, observer: Observer = "mse") -> None:
    """Set every activation quantiser's step from what its tensor holds on calibration images, computed in
    float.

    Args:
        graph_module: From `tasks.nn.qgraph.build`.
        batches: Called twice, for the largest values and for the distributions.
        observer: max_abs: the largest value; percentile: the value that 99.99 % do not exceed; mse: the
            clipping point with the least squared error of the quantised values.

    Raises:
        UserError: the observer is unknown or there are no calibration images.
    """
    if observer not in get_args(Observer):
        raise UserError(
            f"quantize.observer = {observer!r}",
            allowed=", ".join(get_args(Observer)),
            next_step="correct quantize.observer in params.yaml",
        )
    quantizers = {n: m for n, m in graph_module.named_modules() if isinstance(m, ActivationQuantizer)}
    largest = dict.fromkeys(quantizers, 0.0)

    def widest(name: str, x: torch.Tensor) -> None:
        largest[name] = max(largest[name], float(x.abs().max()))

    _observe(graph_module, batches, widest)
    if observer == "max_abs":
        for name, quantizer in quantizers.items():
            quantizer.set_step(largest[name] / Q_MAX)
        return
    histograms = {name: _Histogram(value) for name, value in largest.items() if value > 0}

    def count(name: str, x: torch.Tensor) -> None:
        if name in histograms:
            histograms[name].add(x)

    _observe(graph_module, batches, count)
    clip = _percentile if observer == "percentile" else _least_squares
    for name, quantizer in quantizers.items():
        quantizer.set_step(clip(histograms[name]) / Q_MAX if name in histograms else 0.0)


def _observe(
    graph_module: fx.GraphModule, batches: Batches, see: Callable[[str, torch.Tensor], None]
) -> None:
    run, count = FloatRun(graph_module, see), 0
    for images in batches():
        run.run(images)
        count += len(images)
    if count == 0:
        raise UserError(
            "no calibration images",
            allowed="at least 1, better 100 to 500 images of the real scene",
            next_step="raise prepare's calibration share in params.yaml",
        )


def _percentile(histogram: _Histogram) -> float:
    share = histogram.counts.cumsum(0) / histogram.counts.sum()
    last = int(torch.searchsorted(share, torch.tensor([_PERCENTILE / 100], dtype=torch.float64)))
    return (min(last, _BINS - 1) + 1) * histogram.largest / _BINS


def _least_squares(histogram: _Histogram) -> float:
    """The clipping point whose rounding and clipping errors add up to the least."""
    centres, counts = histogram.centres, histogram.counts
    best, least = histogram.largest, float("inf")
    for i in range(1, _CANDIDATES + 1):
        clip = histogram.largest * i / _CANDIDATES
        step = clip / Q_MAX
        # Inside a step the rounding error is uniform: its mean square is step^2 / 12.
        error = torch.where(centres <= clip, torch.full_like(centres, step**2 / 12), (centres - clip) ** 2)
        total = float((error * counts).sum())
        if total < least:
            best, least = clip, total
    return best
