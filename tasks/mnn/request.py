"""What is asked of the converter, and whether it can be done: checked before the converter runs.

Left to itself the converter ignores compression parameters it cannot apply, crashes on others, and rounds
weights to zero in half precision.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet.device.errors import UserError
from tasks.mnn.half import half_refusals
from tasks.mnn.int8_record import Int8Layer, int8_layers
from tasks.mnn.source import ONNX_DOMAINS, Source, attribute, named, op_name

# Operators through which the converter names a convolution: fused into it, or folded.
_FOLLOWERS = frozenset({"Relu", "Clip", "BatchNormalization"})


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What is asked of the converter."""

    biz_code: str = "edgeloop"
    """Business tag stored in the model."""
    fp16: bool = False
    """Store weights in half precision."""
    weight_bits: int | None = None
    """8: int8 weights, float arithmetic, for the layers that `compression` does not name."""
    compression: Path | None = None
    """MNN's compression parameters (JSON): the scales of the layers that compute in int8."""
    timeout_s: float = 600.0
    """Limit for each child process."""

    def __post_init__(self) -> None:
        if self.weight_bits not in {None, 8} or (self.fp16 and self.weight_bits):
            raise UserError(
                f"weight_bits={self.weight_bits} with fp16={self.fp16}",
                allowed="weight_bits 8 or None; not together with fp16",
                next_step="choose one storage for the weights",
            )
        if not (self.biz_code.isprintable() and 0 < len(self.biz_code) <= 64):
            raise UserError(
                f"biz_code {self.biz_code!r}",
                allowed="1 to 64 printable characters",
                next_step="set convert.biz_code in params.yaml",
            )


def refusals(source: Source, options: ConvertOptions) -> list[str]:
    """Reasons why the converter would crash or silently do something else than asked.

    Raises:
        UserError: the compression parameters cannot be read.
    """
    reasons = _graph_refusals(source)
    layers = int8_layers(options.compression)
    counts = [layer.output for layer in layers]
    reasons += [
        f"int8 layer {name!r} is listed {counts.count(name)} times"
        for name in dict.fromkeys(counts)
        if counts.count(name) > 1
    ]
    reasons += [reason for layer in layers for reason in _int8_refusals(source, layer)]
    if options.fp16:
        reasons += half_refusals(source)
    return reasons


def _graph_refusals(source: Source) -> list[str]:
    """Operators that are not what the converter takes them for: it goes by their name alone."""
    functions = {(function.domain, function.name) for function in source.model.functions}
    nodes = source.model.graph.node
    foreign = [n for n in nodes if n.domain not in ONNX_DOMAINS or (n.domain, n.op_type) in functions]
    training = [
        n
        for n in nodes
        if n.op_type == "BatchNormalization" and (attribute(n, "training_mode", 0) or len(n.output) > 1)
    ]
    reasons = []
    if foreign:
        reasons.append(
            f"operators of foreign domains, which the converter mistakes or drops: {named(foreign)}"
        )
    if training:
        reasons.append(f"exported in training mode, call model.eval() first: {named(training)}")
    return reasons


def _int8_refusals(source: Source, layer: Int8Layer) -> Iterator[str]:
    scales = (layer.input_scale, layer.output_scale, *layer.weight_scales)
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        yield f"int8 layer {layer.output!r} has a scale that is not finite and positive"
    node = source.producers.get(layer.output)
    if node is None:
        yield f"int8 layer {layer.output!r} is no tensor that the model computes: it would stay float"
        return
    while node.op_type in _FOLLOWERS and node.input[0] in source.producers:
        node = source.producers[node.input[0]]
    if op_name(node) != "Conv" or node.input[1] not in source.constants:
        yield (
            f"int8 layer {layer.output!r} is a {op_name(node)}, not a Conv with fixed weights:"
            " it would stay float"
        )
        return
    if layer.output in source.outputs:
        yield f"int8 layer {layer.output!r} ends the graph: it would stay float"
    weight, groups = source.constants[node.input[1]], attribute(node, "group", 1)
    channels = int(weight.dims[0])
    depthwise = groups == channels and weight.dims[1] == 1
    if groups != 1 and not depthwise:
        yield f"int8 layer {layer.output!r} is a grouped Conv (group={groups}): it would stay float"
    if len(layer.weight_scales) != channels:
        yield (
            f"int8 layer {layer.output!r} has {len(layer.weight_scales)} weight scales for {channels} output"
            " channels: the engine would crash"
        )
