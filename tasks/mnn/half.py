"""Weights in half precision: what float16 cannot hold is refused, the rest is rounded before MNN cuts it off.

MNN's converter stores float16 by dropping bits, so every weight shrinks by up to 1/1024 of itself. Rounded to
the nearest float16 beforehand, nothing is left to drop: on a MobileNetV3-Small of handwritten digits the
logits are then 3 to 8 times closer to those of float32.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from tasks.mnn.source import Source, attribute_value, op_name

Doubles = np.ndarray[Any, np.dtype[np.float64]]

_HALF_LOSS = 0.05  # of a weight tensor's norm; rounding to float16 alone costs at most 0.0005
_ALL_LOST = 0.99  # other constants only count when nothing is left of them: a small epsilon is harmless
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})
_QUARTER = 0.25  # of the distance to the next float16: more than a folded product errs by in float32


def rounded_to_half(source: Source) -> onnx.ModelProto:
    """A copy of the model whose weights become the nearest float16 when their lowest bits are dropped.

    A batch norm that the converter folds into a convolution is counted in: it is the product that is stored.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(source.model)
    rounded = {
        name: _rounded(source, node, name)
        for node in source.model.graph.node
        for name in _weights(source, node)
        if len(source.readers[name]) == 1
    }
    stored = [(tensor.name, tensor) for tensor in copy.graph.initializer]
    stored += [
        (node.output[0], node.attribute[0].t) for node in copy.graph.node if node.op_type == "Constant"
    ]
    for name, tensor in stored:
        if name in rounded:
            tensor.CopyFrom(onnx.numpy_helper.from_array(rounded[name], tensor.name))
    return copy


def half_refusals(source: Source) -> Iterator[str]:
    """Constants that float16 cannot hold: overflow, or weights below its subnormals."""
    for node in source.model.graph.node:
        for name in (name for name in node.input if name in source.constants):
            tensor = source.constants[name]
            weight = name in _weights(source, node)
            if tensor.data_type != onnx.TensorProto.FLOAT or not (weight or node.op_type in _ARITHMETIC):
                continue
            lost = _half_loss(source.value(name).astype(np.float64) * _folded_scale(source, node, name))
            if lost > (_HALF_LOSS if weight else _ALL_LOST):
                yield (
                    f"float16 loses {lost:.0%} of {name!r} in {op_name(node)} {node.output[0]!r}:"
                    " its values are outside 6e-8 to 65504"
                )


def _weights(source: Source, node: onnx.NodeProto) -> list[str]:
    """The constant weights of a node that are float32."""
    return [
        name for name in source.weights_of(node) if source.constants[name].data_type == onnx.TensorProto.FLOAT
    ]


def _rounded(source: Source, node: onnx.NodeProto, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    value, scale = source.value(name).astype(np.float64), _folded_scale(source, node, name)
    stored = value * scale
    with np.errstate(over="ignore"):
        half = stored.astype(np.float16)
    nearest = half.astype(np.float64)
    usable = np.isfinite(nearest) & np.broadcast_to(scale != 0, nearest.shape)
    if np.any(scale != 1):  # the product is taken in float32 and may end just below what it should be
        nearest += np.sign(nearest) * _QUARTER * np.spacing(np.abs(half)).astype(np.float64)
    return np.where(usable, nearest / np.where(scale == 0, 1, scale), value).astype(np.float32)


def _folded_scale(source: Source, node: onnx.NodeProto, name: str) -> Doubles:
    """What the converter multiplies the weights by: the scale of a BatchNormalization right behind."""
    norm = source.sole_reader(node.output[0])
    if node.op_type != "Conv" or name != node.input[1] or norm is None:
        return np.ones(1)
    if norm.op_type != "BatchNormalization" or not {norm.input[1], norm.input[4]} <= set(source.constants):
        return np.ones(1)
    gamma, variance = (source.value(norm.input[i]).astype(np.float64) for i in (1, 4))
    epsilon = attribute_value(norm, "epsilon")
    scale = gamma / np.sqrt(variance + (1e-5 if epsilon is None else epsilon))
    return np.asarray(scale.reshape(-1, *[1] * (len(source.constants[name].dims) - 1)))


def _half_loss(values: Doubles) -> float:
    """Share of a tensor's norm that rounding to float16 loses; 1 on overflow."""
    norm = float(np.linalg.norm(values))
    with np.errstate(over="ignore"):
        lost = float(np.linalg.norm(values - values.astype(np.float16)))
    return (lost / norm if math.isfinite(lost) else 1.0) if norm > 0 else 0.0
