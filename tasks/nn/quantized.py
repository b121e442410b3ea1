"""Quantised checkpoints: from a float model to a fake-quant graph, to data, and back to both of its forms."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from tasks.nn.arch import Architecture
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.fakequant import ActivationQuantizer, QuantConv2d, weight_only_int8
from tasks.nn.qgraph import QUANTIZERS, Plan, build, lower, plan


@dataclass(frozen=True, kw_only=True)
class LayerScales:
    """The scales of one int8 convolution."""

    layer: str
    """Module name."""
    input_step: float
    output_step: float
    weight_steps: tuple[float, ...]
    """One per output channel."""


class QuantizedModel:
    """A fake-quant graph with the plan it was built from."""

    def __init__(self, float_model: nn.Module, skip: Sequence[str] = ()) -> None:
        """Build the graph of a float model in eval mode, steps unset; errors as for `qgraph.plan`."""
        graph_module = lower(float_model)
        self.plan: Plan = plan(graph_module, skip)
        self.graph: fx.GraphModule = build(graph_module, self.plan)

    @property
    def layers(self) -> dict[str, QuantConv2d]:
        """The int8 convolutions by module name, in order of execution."""
        found = {name: self.graph.get_submodule(name) for name in self.plan.layers}
        return {name: module for name, module in found.items() if isinstance(module, QuantConv2d)}

    def freeze(self) -> None:
        """Round what stays float the way the converter will: int8 weights, where those are safe."""
        if not self.plan.weight_only_safe:
            return
        with torch.no_grad():
            for module in self.graph.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    module.weight.copy_(weight_only_int8(module.weight))

    def to_checkpoint(self, parent: Checkpoint) -> Checkpoint:
        """This model as data; architecture, labels and preprocess are its parent's."""
        state = {k: v.detach().cpu().clone() for k, v in self.graph.state_dict().items()}
        return replace(parent, state=state, float_layers=tuple(self.plan.left_float))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "QuantizedModel":
        """The inverse of `to_checkpoint`; the graph is in eval mode."""
        assert checkpoint.float_layers is not None, "a float checkpoint is built by its own build()"
        model = cls(checkpoint.architecture.build().eval(), checkpoint.float_layers)
        model.graph.load_state_dict(checkpoint.state)
        model.graph.eval()
        return model

    def float_twin(self, architecture: Architecture) -> fx.GraphModule:
        """The float graph to export: the same operators, with weights that lie on the int8 grid."""
        twin, state = lower(architecture.build().eval()), self.graph.state_dict()
        for name, layer in self.layers.items():
            state[f"{name}.weight"] = layer.weight_integers() * layer.weight_step.view(-1, 1, 1, 1)
        twin.load_state_dict({name: state[name].detach() for name in twin.state_dict()})
        return twin

    def scales(self) -> list[LayerScales]:
        """What the converter is told about each int8 layer."""
        records = []
        for op in self.plan.operators:
            if op.kind == "conv" and op.node in self.plan.int8:
                name = str(op.core.target)
                records.append(
                    LayerScales(
                        layer=name,
                        input_step=self._step(op.inputs[0]),
                        output_step=self._step(op.node),
                        weight_steps=tuple(self.layers[name].weight_step.tolist()),
                    )
                )
        return records

    def _step(self, tensor: fx.Node) -> float:
        quantizer = self.graph.get_submodule(f"{QUANTIZERS}.{self.plan.scales.owner(tensor).name}")
        assert isinstance(quantizer, ActivationQuantizer), tensor
        return quantizer.step.item()
