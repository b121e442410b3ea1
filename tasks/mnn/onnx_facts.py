"""What more than one check of a graph asks of it."""

import onnx

from tasks.mnn.source import ONNX_DOMAINS


def opset(model: onnx.ModelProto) -> int:
    """Version of ONNX's own operator set."""
    return next(int(o.version) for o in model.opset_import if o.domain in ONNX_DOMAINS)


def ranks(model: onnx.ModelProto) -> dict[str, int]:
    """Number of axes of each tensor of the main graph for which it is declared or was inferred."""
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}
