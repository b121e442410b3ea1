"""Intermediate tensors of a torch graph under the names the exported ONNX gives them.

For variants whose reference is not the ONNX graph: rounded weights, fake-quant. Layers are identified by
their weights, whose names the exporter keeps (`features.0.0.weight`), and graph outputs by their order.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import fx, nn

from tasks.mnn.bisect import TensorSource
from tasks.mnn.compare import Array
from tasks.nn.fakequant import ActivationQuantizer

_FUSED = (nn.ReLU, nn.ReLU6)


def torch_tensors(model: fx.GraphModule, onnx_path: Path, inputs: Array) -> TensorSource:
    """The outputs of convolution and linear layers, and the model's outputs.

    Args:
        model: The reference; its layers have the names of the exported model's.
        onnx_path: The exported graph, whose tensor names are asked for.
        inputs: One input, float32 [1, 3, H, W].

    Returns:
        A source that runs the model once for each request and keeps only what was asked for.
    """
    nodes = _nodes_by_tensor(model, onnx.load(str(onnx_path)).graph)

    def fetch(wanted: Sequence[str]) -> Mapping[str, Array]:
        found = {name: nodes[name] for name in wanted if name in nodes}
        recorder = _Recorder(model, set(found.values()))
        with torch.inference_mode():
            recorder.run(torch.from_numpy(inputs))
        return {name: recorder.values[node] for name, node in found.items()}

    return fetch


class _Recorder(fx.Interpreter):
    def __init__(self, model: fx.GraphModule, keep: set[fx.Node]) -> None:
        super().__init__(model)
        self.keep = keep
        self.values: dict[fx.Node, Array] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.keep:
            self.values[n] = np.array(value)
        return value


def _nodes_by_tensor(model: fx.GraphModule, graph: onnx.GraphProto) -> dict[str, fx.Node]:
    calls = {node.target: node for node in model.graph.nodes if node.op == "call_module"}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for tensor in node.input:
            readers.setdefault(tensor, []).append(node)
    found: dict[str, fx.Node] = {}
    for node in graph.node:
        layer = node.input[1].removesuffix(".weight") if node.op_type in ("Conv", "Gemm") else None
        if layer not in calls:
            continue
        tensor = node.output[0]
        found[tensor] = _quantized(calls[layer], model)
        after = readers.get(tensor, [])
        if len(after) == 1 and after[0].op_type in ("Relu", "Clip"):
            found[after[0].output[0]] = _quantized(_activation(calls[layer], model), model)
    returned = next(node for node in model.graph.nodes if node.op == "output").all_input_nodes
    return found | {output.name: node for output, node in zip(graph.output, returned, strict=True)}


def _reader(node: fx.Node, model: fx.GraphModule, kind: Any) -> fx.Node | None:
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_module":
        return None
    return users[0] if isinstance(model.get_submodule(str(users[0].target)), kind) else None


def _activation(node: fx.Node, model: fx.GraphModule) -> fx.Node:
    """The activation after a layer, or the layer itself where its quantiser does the clamping."""
    return _reader(node, model, _FUSED) or node


def _quantized(node: fx.Node, model: fx.GraphModule) -> fx.Node:
    """What the engine stores: the quantiser's output where one follows."""
    return _reader(node, model, ActivationQuantizer) or node
