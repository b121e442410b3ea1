"""The audit of a converted model: what is in the file against what was asked.

Parity cannot see a layer that silently stayed float: its outputs look perfect. The graph itself tells.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx

from tasks.mnn.graph import MnnGraph, MnnOp
from tasks.mnn.int8_record import Int8Layer, int8_layers
from tasks.mnn.request import ConvertOptions
from tasks.mnn.source import Source, element_count

# A model may exceed its expected size by this much before it counts as wrong.
_SIZE_FACTOR = 1.15
_OP_BYTES = 1024  # names, attributes, and the code table of a quantised layer
_SCALE_TOLERANCE = 1e-5  # relative; the dump prints six decimals
_DUMP_DECIMAL = 1e-6


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What a converted model holds, and every reason why it is not what was asked."""

    reasons: tuple[str, ...]
    """Why the model must not be used; empty when it is what was asked."""
    ops: Mapping[str, int]
    """Operators of the converted graph that compute, by MNN type."""
    onnx_ops: Mapping[str, int]
    """Operators of the ONNX, by type."""
    absorbed: Mapping[str, int]
    """ONNX operators that are no operator of their own any more: fused, folded or removed, by type."""
    added: Mapping[str, int]
    """MNN operators that are none of the ONNX's: layout changes, decompositions, by type."""
    int8_layers: tuple[str, ...]
    """Output tensors of the layers with int8 weights and int8 arithmetic."""
    weights: Mapping[str, int]
    """Layers with weights by how these are stored, e.g. {"int8": 52, "float32": 2}."""
    size_bytes: int
    expected_size_bytes: int
    """From the ONNX's constants and the bits asked for."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return {**asdict(self), "ok": self.ok}


def audit(source: Source, graph: MnnGraph, size_bytes: int, options: ConvertOptions) -> Audit:
    """Compare a converted graph with the ONNX it came from and the options it was made with."""
    asked = int8_layers(options.compression)
    expected = expected_size_bytes(source, options)
    absorbed, added = _difference(source, graph)
    reasons = [
        *_int8_reasons(graph, asked),
        *_weight_reasons(graph, asked, options),
        *_fusion_reasons(graph),
        *_size_reasons(size_bytes, expected, len(graph.ops)),
    ]
    if graph.biz_code != options.biz_code:
        reasons.append(f"the model's biz code is {graph.biz_code!r}, asked was {options.biz_code!r}")
    return Audit(
        reasons=tuple(reasons),
        ops=dict(sorted(graph.op_counts.items())),
        onnx_ops=dict(sorted(source.op_counts.items())),
        absorbed=dict(sorted(absorbed.items())),
        added=dict(sorted(added.items())),
        int8_layers=tuple(op.outputs[0] for op in graph.ops if op.int8),
        weights=dict(sorted(Counter(op.weight_type for op in graph.ops if op.weight_type).items())),
        size_bytes=size_bytes,
        expected_size_bytes=expected,
    )


def expected_size_bytes(source: Source, options: ConvertOptions) -> int:
    """Size of the constants at the bits asked for, without names and attributes."""
    named_int8 = {layer.output for layer in int8_layers(options.compression)}
    weights = {name for node in source.model.graph.node for name in source.weights_of(node)}
    one_byte = weights if options.weight_bits else _weights_of(source, named_int8)
    total = 0
    for name, tensor in source.constants.items():
        floating = tensor.data_type in {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE}
        width = 2 if options.fp16 and floating else 4
        total += element_count(tensor) * (1 if name in one_byte else width)
        if name in one_byte:  # two floats for each output channel, whichever axis that is
            total += 8 * max(tensor.dims[:2])
    return total


def _weights_of(source: Source, outputs: set[str]) -> set[str]:
    """Weights of the convolutions that write these tensors, seen through what is fused into them."""
    found = set()
    for name in outputs:
        node = source.producers.get(name)
        while node is not None and node.op_type != "Conv":
            node = source.producers.get(node.input[0]) if node.input else None
        if node is not None:
            found.add(node.input[1])
    return found


def _int8_reasons(graph: MnnGraph, asked: tuple[Int8Layer, ...]) -> Iterator[str]:
    layers = {op.outputs[0]: op for op in graph.ops if op.weight_type}
    for layer in asked:
        op = layers.get(layer.output)
        if op is None:
            yield f"int8 layer {layer.output!r}: the converted graph has no such layer, it stayed float"
        elif not op.int8:
            yield f"int8 layer {layer.output!r} stayed float: a {op.type} with {op.weight_type} weights"
        else:
            yield from _scale_reasons(graph, layer, op)
    names = {layer.output for layer in asked}
    for op in graph.ops:
        if op.int8 and op.outputs[0] not in names:
            yield f"{op.type} {op.outputs[0]!r} is int8 although nothing asked for it"


def _scale_reasons(graph: MnnGraph, layer: Int8Layer, op: MnnOp) -> Iterator[str]:
    if not np.allclose(op.weight_scales, layer.weight_scales, rtol=_SCALE_TOLERANCE, atol=0):
        yield f"int8 layer {layer.output!r}: the weight scales in the model are not the ones asked for"
    for tensor, scale in ((op.inputs[0], layer.input_scale), (layer.output, layer.output_scale)):
        if abs(graph.scales[tensor] - scale) > _DUMP_DECIMAL + _SCALE_TOLERANCE * scale:
            yield (
                f"int8 layer {layer.output!r}: tensor {tensor!r} has the scale {graph.scales[tensor]:g},"
                f" asked was {scale:g}"
            )


def _weight_reasons(graph: MnnGraph, asked: tuple[Int8Layer, ...], options: ConvertOptions) -> Iterator[str]:
    int8 = {layer.output for layer in asked}
    others = ("int8", 8) if options.weight_bits else ("float16", 16) if options.fp16 else ("float32", 32)
    for op in graph.ops:
        if op.weight_type and op.outputs[0] not in int8 and (op.weight_type, op.weight_bits) != others:
            yield (
                f"{op.type} {op.outputs[0]!r} has {op.weight_type} weights of {op.weight_bits} bits,"
                f" asked was {others[0]}"
            )
        if op.weight_type == "int8" and not np.isfinite(op.weight_scales).all():
            yield f"{op.type} {op.outputs[0]!r} has weight scales that are not finite"


def _fusion_reasons(graph: MnnGraph) -> Iterator[str]:
    """Batch norms and ReLUs that follow a convolution alone must have gone into it."""
    readers = Counter(name for op in graph.ops for name in op.inputs)
    convolutions = {op.outputs[0] for op in graph.ops if op.weight_type}
    for op in graph.ops:
        fusable = op.type in {"BatchNorm", "Scale"} or _is_relu(op)
        if fusable and op.inputs[0] in convolutions and readers[op.inputs[0]] == 1:
            yield f"{op.type} {op.name!r} was not fused into the convolution before it"


def _is_relu(op: MnnOp) -> bool:
    plain = op.type == "ReLU" and not op.attributes.get("slope")
    return plain or (op.type == "ReLU6" and (op.attributes["minValue"], op.attributes["maxValue"]) == (0, 6))


def _size_reasons(size_bytes: int, expected: int, num_ops: int) -> Iterator[str]:
    limit = int(expected * _SIZE_FACTOR) + _OP_BYTES * (num_ops + 4)
    if size_bytes > limit:
        yield f"the model has {size_bytes} bytes, its constants at the bits asked for allow {limit}"


def _difference(source: Source, graph: MnnGraph) -> tuple[Counter[str], Counter[str]]:
    """ONNX operators without an operator of their own, and MNN operators that are none of the ONNX's."""
    kept = {op.name for op in graph.ops}
    written = set(source.producers)
    absorbed = Counter(
        node.op_type
        for node in source.model.graph.node
        if node.op_type != "Constant" and node.output[0] not in kept
    )
    passive = {"Input", "Const"}
    added = Counter(op.type for op in graph.ops if op.type not in passive and op.name not in written)
    return absorbed, added
