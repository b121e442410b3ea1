"""The operator audit before training is spent: what this engine runs, in int8, in float, or not at all."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.mnn.converter import supported_ops
from tasks.mnn.source import read_source

Support = Literal["runs", "no session", "unknown"]

# Become engine subgraphs, which only its module interface runs.
_SUBGRAPHS = frozenset({"If", "Loop", "Scan", "LSTM", "GRU", "RNN"})
# Compute in int8 on the CPU backend when all their tensors carry scales; measured, MNN 3.6.1.
_INT8 = frozenset({"Conv", "Add", "Mul", "AveragePool", "GlobalAveragePool", "Relu", "Clip"})
_NOTES = {
    "HardSwish": "not fused into a convolution, float between int8 layers; ReLU6 instead is fused and free",
    "HardSigmoid": "becomes three operators (mul, add, ReLU6), float between int8 layers",
    "ConvTranspose": "stays float, or int8 weights only",
    "MaxPool": "int8 is wrong for negative values on x86: keep it behind a ReLU or in float",
    "MatMul": "int8 weights only; with fixed weights it becomes a 1x1 convolution",
    "Gemm": "int8 weights only; becomes a 1x1 convolution",
}
_WHY_NOT = {
    "no session": "becomes a subgraph, which an engine session cannot run",
    "unknown": "the converter has no such operator: the conversion would be refused",
}


@dataclass(frozen=True, kw_only=True)
class OpSupport:
    """One operator type of a model and what the engine makes of it."""

    op: str
    """ONNX type; foreign domains as `domain::Type`."""
    count: int
    support: Support
    """runs: on the CPU backend, natively or decomposed; unknown: the conversion fails."""
    int8: bool
    """Whether the CPU backend can compute it in int8."""
    note: str
    """What it costs and what to use instead, where that is known."""


def op_support(onnx: Path) -> list[OpSupport]:
    """Every operator type of a model, unsupported ones first, then by name.

    A model need not be trained for this: export it once with its initial weights.

    Raises:
        UserError: the ONNX cannot be read.
        EngineError: the converter does not list its operators.
    """
    known = supported_ops()
    rows = [_row(op, count, known) for op, count in read_source(onnx).op_counts.items()]
    return sorted(rows, key=lambda row: (row.support == "runs", row.op))


def unsupported(rows: list[OpSupport]) -> Counter[str]:
    """Operators that keep a model from the engine, by type."""
    return Counter({row.op: row.count for row in rows if row.support != "runs"})


def _row(op: str, count: int, known: frozenset[str]) -> OpSupport:
    support: Support = "runs" if op in known else "unknown"
    if op in _SUBGRAPHS:
        support = "no session"
    return OpSupport(
        op=op,
        count=count,
        support=support,
        int8=op in _INT8,
        note=_WHY_NOT.get(support, _NOTES.get(op, "")),
    )
