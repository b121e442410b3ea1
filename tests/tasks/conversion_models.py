"""Small ONNX models and compression parameters for the converter tests; names, shapes, seeds are free."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper, save, shape_inference

Array = npt.NDArray[Any]


def node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(kind, list(inputs), [output], **attributes)


def write_model(
    path: Path,
    nodes: Sequence[NodeProto],
    constants: Mapping[str, Array],
    *,
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    opset: int = 17,
    domains: Sequence[str] = (),
) -> Path:
    """Save a graph; output shapes are inferred, or one unknown axis where an operator is unknown."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, list(s)) for k, s in inputs.items()],
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, None) for k in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    path.parent.mkdir(parents=True, exist_ok=True)
    model = shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    for output in model.graph.output:
        if not output.type.tensor_type.HasField("shape"):
            output.type.tensor_type.shape.dim.add().dim_param = "n"
    save(model, str(path))
    return path


def conv_weight(rng: np.random.Generator, out: int, inside: int, kernel: int = 3) -> Array:
    return rng.normal(0, 0.2, (out, inside, kernel, kernel)).astype(np.float32)


def two_convs(path: Path, *, seed: int = 0, width: int = 8, names: str = "", size: int = 8) -> Path:
    """input -> Conv, Relu -> depthwise Conv, Clip(0, 6) -> Conv -> logits; tensor names end in `names`."""
    rng = np.random.default_rng(seed)
    a, b, c, d, e, f = (f"{x}{names}" for x in ("input", "conv1", "relu1", "conv2", "clip2", "logits"))
    nodes = [
        node("Conv", [a, "w1"], b, kernel_shape=[3, 3], pads=[1] * 4),
        node("Relu", [b], c),
        node("Conv", [c, "w2"], d, kernel_shape=[3, 3], pads=[1] * 4, group=width),
        node("Clip", [d, "low", "high"], e),
        node("Conv", [e, "w3"], f, kernel_shape=[1, 1]),
    ]
    constants = {
        "w1": conv_weight(rng, width, 3),
        "w2": conv_weight(rng, width, 1),
        "w3": conv_weight(rng, 5, width, 1),
        "low": np.array(0, np.float32),
        "high": np.array(6, np.float32),
    }
    return write_model(path, nodes, constants, inputs={a: [1, 3, size, size]}, outputs=[f])


def layer(name: str, channels: int, /, **changes: Any) -> dict[str, Any]:
    """One record of the compression parameters; `changes` replace input, output, weight scales or bits."""
    bits = {"bits": changes.get("bits", 8), "clampMin": -127, "clampMax": 127}
    return {
        "input": [{"name": "any", "scales": [changes.get("input", 0.02)], "zeroPoint": 0, **bits}],
        "weight": [{"name": "any", "scales": changes.get("weight", [0.004] * channels), **bits}],
        "output": [{"name": name, "scales": [changes.get("output", 0.04)], "zeroPoint": 0, **bits}],
    }


def two_conv_layers(width: int = 8, names: str = "") -> list[dict[str, Any]]:
    """int8 for the first two convolutions of `two_convs`."""
    return [
        layer(f"relu1{names}", width, output=0.03),
        layer(f"clip2{names}", width, input=0.03, output=6 / 127),
    ]


def write_compression(path: Path, layers: Sequence[Mapping[str, Any]]) -> Path:
    document = {"version": "0.0.0", "algo": [{"type": "QUANTIZE", "quantParams": {"layer": list(layers)}}]}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
