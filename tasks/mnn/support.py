"""Operators as this engine sees them: which its converter does not know, and what the others cost."""

from collections.abc import Sequence
from functools import cache

import onnx

from tasks.mnn.converter import supported_ops
from tasks.mnn.source import ONNX_DOMAINS

NOTES = {
    "HardSwish": "not fused into a convolution, float between int8 layers; ReLU6 instead is fused and free",
    "HardSigmoid": "becomes three operators (mul, add, ReLU6), float between int8 layers",
    "ConvTranspose": "stays float, or int8 weights only",
    "MaxPool": "int8 is wrong for negative values on x86: keep it behind a ReLU or in float",
    "MatMul": "int8 weights only; with fixed weights it becomes a 1x1 convolution",
    "Gemm": "int8 weights only; becomes a 1x1 convolution",
}
"""What an operator costs on the CPU backend and what to use instead, by ONNX type; measured, MNN 3.6.1."""


def unknown_nodes(model: onnx.ModelProto) -> Sequence[onnx.NodeProto]:
    """Nodes of the main graph whose operator the converter has no word for: it would write no file.

    Raises:
        EngineError: the converter does not list its operators.
    """
    known = _known()
    return [n for n in model.graph.node if n.domain in ONNX_DOMAINS and n.op_type not in known]


@cache
def _known() -> frozenset[str]:
    return supported_ops()
