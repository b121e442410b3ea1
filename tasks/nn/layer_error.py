"""How much each int8 layer loses, to rank layers and decide which stay float."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tasks.nn.calibrate import Batches
from tasks.nn.fakequant import ActivationQuantizer, QuantConv2d
from tasks.nn.float_run import FloatRun
from tasks.nn.quantized import QuantizedModel

_EXACT_SNR_DB = 200.0


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """Error of one int8 convolution's output on calibration images."""

    layer: str
    """Module name."""
    snr_db: float
    """Signal over error in decibels, with this layer quantised alone; 200 where there is no error."""
    cosine: float
    """Cosine of the float and the quantised output, with this layer quantised alone."""
    snr_in_place_db: float
    """The same ratio with every layer before it quantised too."""
    cosine_in_place: float


class _Sums:
    """Sums over all images from which cosine and signal-to-noise ratio follow."""

    def __init__(self) -> None:
        self.expected, self.got, self.both, self.error = 0.0, 0.0, 0.0, 0.0

    def add(self, expected: torch.Tensor, got: torch.Tensor) -> None:
        expected, got = expected.double().flatten(), got.double().flatten()
        self.expected += float(expected @ expected)
        self.got += float(got @ got)
        self.both += float(expected @ got)
        self.error += float((expected - got).square().sum())

    @property
    def snr_db(self) -> float:
        if self.error == 0:
            return _EXACT_SNR_DB
        return 10 * math.log10(max(self.expected, 1e-30) / self.error)

    @property
    def cosine(self) -> float:
        norm = math.sqrt(self.expected * self.got)
        return self.both / norm if norm > 0 else float(self.expected == self.got)


class _Alone(FloatRun):
    """A float run that also quantises every convolution alone, on the float values of its input."""

    def __init__(self, model: QuantizedModel, sums: dict[str, _Sums]) -> None:
        super().__init__(model.graph)
        self._outputs, self._sums = output_quantizers(model), sums
        self.float_outputs: dict[str, torch.Tensor] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = super().call_module(target, args, kwargs)
        module = self.fetch_attr(str(target))
        if isinstance(module, QuantConv2d):
            quantizer = self._outputs[str(target)]
            expected = quantizer.in_float(values)
            self._sums[str(target)].add(expected, quantizer(module(module.input_quantizer(args[0]))))
            self.float_outputs[str(target)] = (
                expected.clone()
            )  # the activation that follows may work in place
        return values


class _InPlace(fx.Interpreter):
    """A run of the quantised graph that compares every convolution with what the float run had there."""

    def __init__(self, model: QuantizedModel, sums: dict[str, _Sums]) -> None:
        super().__init__(model.graph)
        self._outputs, self._sums = output_quantizers(model), sums
        self.expected: dict[str, torch.Tensor] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = super().call_module(target, args, kwargs)
        if str(target) in self._outputs:
            self._sums[str(target)].add(self.expected[str(target)], self._outputs[str(target)](values))
        return values


@torch.no_grad()
def layer_errors(model: QuantizedModel, batches: Batches) -> list[LayerError]:
    """The error of each int8 convolution, worst first (by its signal-to-noise ratio alone).

    Args:
        model: Calibrated, in eval mode.
        batches: Images to measure on, float32 [N, 3, H, W] each.
    """
    alone: dict[str, _Sums] = defaultdict(_Sums)
    in_place: dict[str, _Sums] = defaultdict(_Sums)
    float_run, int8_run = _Alone(model, alone), _InPlace(model, in_place)
    for images in batches():
        float_run.run(images)
        int8_run.expected = float_run.float_outputs
        int8_run.run(images)
    errors = [
        LayerError(
            layer=name,
            snr_db=alone[name].snr_db,
            cosine=alone[name].cosine,
            snr_in_place_db=in_place[name].snr_db,
            cosine_in_place=in_place[name].cosine,
        )
        for name in model.layers
        if name in alone
    ]
    return sorted(errors, key=lambda error: error.snr_db)


def output_quantizers(model: QuantizedModel) -> dict[str, ActivationQuantizer]:
    """Module name of each int8 convolution -> the quantiser of its output."""
    found = {}
    for node in model.graph.graph.nodes:
        if node.op == "call_module" and str(node.target) in model.layers:
            quantizer = model.graph.get_submodule(str(next(iter(node.users)).target))
            assert isinstance(quantizer, ActivationQuantizer), node
            found[str(node.target)] = quantizer
    return found
