"""What more than one check of a graph asks of it."""

import onnx

from tasks.mnn.source import ONNX_DOMAINS


def opset(model: onnx.ModelProto) -> int:
    """Version of ONNX's own operator set."""
    return next(int(o.version) for o in model.opset_import if o.domain in ONNX_DOMAINS)


def extents(model: onnx.ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Extents of each tensor of the main graph whose axes are declared or were inferred; None is dynamic."""
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {
        v.name: tuple(d.dim_value if d.HasField("dim_value") else None for d in v.type.tensor_type.shape.dim)
        for v in values
        if v.type.tensor_type.HasField("shape")
    }


def ranks(model: onnx.ModelProto) -> dict[str, int]:
    """Number of axes of each tensor that `extents` knows."""
    return {name: len(axes) for name, axes in extents(model).items()}
