"""Saying the same graph in words that MNN's converter understands.

The converter reads only the first operator set, ignores domains and functions, and takes zero or garbage for
some attributes that ONNX lets one leave out. Each rewrite here keeps the meaning; parity with the graph as it
came is measured afterwards, so a rewrite that does not is found.
"""

import onnx
from onnx import inliner

_WINDOWED = {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"}


def rewrite(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """The model with its functions inlined, its operator sets in order, and its defaults written out.

    Returns:
        A new model, and one sentence for each rewrite that is more than writing a default out.
    """
    notes = []
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if copy.functions:
        notes.append(f"inlined the model's own functions {', '.join(sorted(f.name for f in copy.functions))}")
        copy = inliner.inline_local_functions(copy)
    if copy.opset_import[0].domain not in ("", "ai.onnx"):
        notes.append(f"put ai.onnx before {copy.opset_import[0].domain!r} in the list of operator sets")
        ordered = sorted(copy.opset_import, key=lambda o: o.domain not in ("", "ai.onnx"))
        del copy.opset_import[:]
        copy.opset_import.extend(ordered)
    weights = {tensor.name: tensor.dims for tensor in copy.graph.initializer}
    for node in copy.graph.node:
        _write_defaults(node, copy.opset_import[0].version, weights)
    return copy, notes


def _write_defaults(node: onnx.NodeProto, opset: int, weights: dict[str, list[int]]) -> None:
    """Add the attributes that ONNX defines a default for and the node leaves out."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opset):
        return
    present = {attribute.name for attribute in node.attribute}
    schema = onnx.defs.get_schema(node.op_type, opset)
    for name, attribute in schema.attributes.items():
        if name not in present and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(attribute.default_value)
    if node.op_type in _WINDOWED:
        _write_window(node, present, weights)


def _write_window(node: onnx.NodeProto, present: set[str], weights: dict[str, list[int]]) -> None:
    """The defaults of a sliding window depend on its rank, so the schema does not hold them."""
    kernel = next((list(a.ints) for a in node.attribute if a.name == "kernel_shape"), None)
    if kernel is None and len(node.input) > 1 and node.input[1] in weights:
        kernel = list(weights[node.input[1]][2:])
        node.attribute.append(onnx.helper.make_attribute("kernel_shape", kernel))
    if kernel is None:
        return
    if "strides" not in present:
        node.attribute.append(onnx.helper.make_attribute("strides", [1] * len(kernel)))
