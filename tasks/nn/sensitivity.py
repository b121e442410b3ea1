"""What int8 costs layer by layer: each quantised alone, and each left out, counted in right answers.

A layer alone is a fake-quant model of its own, built by the engine's rules with every other layer skipped,
so what the engine would do to the tensors around the layer is in its cost. Steps are those of the fully
quantised model: they are what would be deployed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tasks.nn.calibrate import Observer, calibrate
from tasks.nn.fakequant import ActivationQuantizer
from tasks.nn.layer_error import layer_errors
from tasks.nn.qgraph import QUANTIZERS
from tasks.nn.quantized import QuantizedModel
from tasks.paired import Paired
from tasks.progress import track

Logits = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

_BATCH = 64
_EXACT_SNR_DB = 200.0


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer costs in int8."""

    rank: int
    """1 is the most sensitive."""
    layer: str
    """Module name."""
    alone: Paired
    """Lost when it alone is quantised."""
    logits_snr_db: float
    """Signal over error of the logits then, in decibels; 200 where there is no error. Unlike accuracy it
    tells layers apart that flip no prediction, and unlike the layer's own error it is one unit for all."""
    snr_db: float
    """Signal over error of the layer's own output."""
    cosine: float
    """Of the layer's output in float and quantised."""
    given_back: Paired
    """Lost from "all but this layer in int8" to "all in int8": what leaving it out brings."""


class Trials:
    """One float model, its calibration, and the images that are counted."""

    def __init__(
        self,
        *,
        build: Callable[[], nn.Module],
        calibration: torch.Tensor,
        observer: Observer,
        skip: Sequence[str],
        images: torch.Tensor,
        labels: Labels,
    ) -> None:
        """Quantise the whole model and ask it and its float parent.

        Args:
            build: Gives the float model in eval mode, each time anew.
            calibration: Images for the steps, float32 [N, 3, H, W].
            observer: How steps follow from them.
            skip: Layers that stay float in any case.
            images: Images to count on, float32 [M, 3, H, W].
            labels: Their classes, all known, [M].

        Raises:
            UserError: there are no calibration images, or a pattern of `skip` names no layer.
        """
        self._build, self._calibration = build, calibration
        self.images, self.labels = images, labels
        self.full = QuantizedModel(build(), skip)
        calibrate(self.full.graph, self._batches, observer)
        self._steps = _steps_by_tensor(self.full)
        self.skipped = tuple(self.full.plan.left_float)
        """Layers that are float from the start: by rule, or because the engine has no int8 for them."""
        self.floating = self.ask(build())

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that can be int8, in order of execution."""
        return self.full.plan.layers

    def quantized(self, left_out: Sequence[str]) -> QuantizedModel:
        """The model in int8 but for some layers, with the steps of the whole.

        Raises:
            UserError: no layer is left to run in int8.
        """
        model = QuantizedModel(self._build(), (*self.skipped, *left_out))
        for name, quantizer in model.graph.get_submodule(QUANTIZERS).named_children():
            assert isinstance(quantizer, ActivationQuantizer), name
            quantizer.set_step(self._steps[name])
        return model

    def deployed(self, left_out: Sequence[str]) -> QuantizedModel:
        """The same, with the weights of float layers as the converter stores them."""
        model = self.quantized(left_out)
        model.freeze()
        return model

    def ask(self, model: nn.Module) -> Logits:
        """Logits for all images, [M, num_classes]."""
        with torch.inference_mode():
            return np.concatenate([model(x).float().numpy() for x in torch.split(self.images, _BATCH)])

    def drop(self, before: Logits, after: Logits) -> Paired:
        """What is lost from one set of logits to another."""
        return Paired.of(before.argmax(1) == self.labels, after.argmax(1) == self.labels)

    def errors(self) -> dict[str, tuple[float, float]]:
        """Of each layer's own output, quantised alone, on the calibration images: SNR in dB and cosine."""
        return {e.layer: (e.snr_db, e.cosine) for e in layer_errors(self.full, self._batches)}

    def _batches(self) -> Iterator[torch.Tensor]:
        yield from torch.split(self._calibration, _BATCH)


def layer_costs(trials: Trials) -> list[LayerCost]:
    """Every layer's cost, the most sensitive first.

    Layers whose loss alone is certain (its interval leaves out 0) come first, by that loss. All others are
    ties as far as these images can tell, and follow by the error they leave in the logits.
    """
    errors, everything = trials.errors(), trials.ask(trials.deployed(()).graph)
    found = []
    for layer in track(trials.layers, "sensitivity: layers", len(trials.layers)):
        others = [name for name in trials.layers if name != layer]
        logits = trials.ask(trials.quantized(others).graph)
        without = trials.ask(trials.deployed((layer,)).graph) if others else trials.floating
        found.append(
            LayerCost(
                rank=0,
                layer=layer,
                alone=trials.drop(trials.floating, logits),
                logits_snr_db=snr_db(trials.floating, logits),
                snr_db=errors[layer][0],
                cosine=errors[layer][1],
                given_back=trials.drop(without, everything),
            )
        )
    found.sort(key=_sensitivity)
    return [replace(cost, rank=rank) for rank, cost in enumerate(found, start=1)]


def snr_db(expected: Logits, got: Logits) -> float:
    """Signal over error in decibels, 200 at most."""
    error = float(np.square((expected - got).astype(np.float64)).sum())
    signal = float(np.square(expected.astype(np.float64)).sum())
    if error == 0:
        return _EXACT_SNR_DB
    return min(_EXACT_SNR_DB, 10 * math.log10(max(signal, 1e-30) / error))


def _sensitivity(cost: LayerCost) -> tuple[float, float]:
    """Sorts the most sensitive first."""
    certain = cost.alone.drop_pp if cost.alone.low_pp > 0 else 0.0
    return (-certain, cost.logits_snr_db)


def _steps_by_tensor(model: QuantizedModel) -> dict[str, float]:
    """The step of every tensor that carries a scale, by its name in the graph."""
    scales, steps = model.plan.scales, {}
    for op in model.plan.operators:
        for tensor in (op.node, *op.inputs):
            if tensor in scales:
                quantizer = model.graph.get_submodule(f"{QUANTIZERS}.{scales.owner(tensor).name}")
                assert isinstance(quantizer, ActivationQuantizer), tensor
                steps[tensor.name] = quantizer.step.item()
    return steps
