"""A converted model's graph as records, parsed from the converter's JSON dump."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

WeightType = Literal["float32", "float16", "int8"]

# The dump spells out every weight: numbers under these keys are replaced by how many there were.
_ARRAYS = re.compile(
    r'"(weight|bias|buffer|alpha|index|float32s|int32s|int64s|int8s|uint8s)": \n\[([^\[\]{}"]*)\]'
)
_NOT_JSON = re.compile(r"(?<=[ \[])(-?)(nan|inf)(?=[,\s])")  # how the converter prints them
_WEIGHT_TYPES: dict[int, WeightType] = {1: "int8", 3: "float16"}  # by IDSTQuan.type
_WEIGHTED = frozenset({"Convolution", "ConvolutionDepthwise", "Deconvolution", "DeconvolutionDepthwise"})


@dataclass(frozen=True, kw_only=True)
class MnnOp:
    """One operator of the converted graph."""

    name: str
    type: str
    """MNN's type; for unary and binary operators with the function, e.g. UnaryOp.HARDSWISH."""
    inputs: tuple[str, ...]
    """Tensor names."""
    outputs: tuple[str, ...]
    weight_type: WeightType | None
    """How the weights are stored; None for an operator without any."""
    weight_bits: int | None
    weight_scales: int
    """Number of scales of quantised weights."""
    int8: bool
    """Whether it computes in int8: quantised weights, and scales on its input and output tensors."""
    activation: Literal["relu", "relu6"] | None
    """Fused activation."""


@dataclass(frozen=True, kw_only=True)
class MnnGraph:
    """The whole converted graph, subgraphs excluded."""

    ops: tuple[MnnOp, ...]
    """In the engine's order, Input and Const included."""
    outputs: tuple[str, ...]
    scales: Mapping[str, float]
    """Tensor name to its int8 scale."""
    uuid: str
    biz_code: str
    version: str
    """Of the converter that wrote it."""
    subgraphs: int
    """Bodies of If, While and friends."""

    @property
    def op_counts(self) -> Counter[str]:
        """Operators that compute, by type."""
        return Counter(op.type for op in self.ops if op.type not in ("Input", "Const"))


def parse_graph(dump: str) -> MnnGraph:
    """Read a dump made by `tasks.mnn.converter.dump_json`."""
    counted = _ARRAYS.sub(lambda m: f'"{m[1]}": {m[2].count(",") + bool(m[2].strip())}', dump)
    document = json.loads(_NOT_JSON.sub(lambda m: m[1] + {"nan": "NaN", "inf": "Infinity"}[m[2]], counted))
    names = document.get("tensorName", [])
    scales = {
        names[entry["index"]]: float(entry["quantInfo"]["scale"])
        for entry in document.get("extraTensorDescribe", [])
        if entry.get("quantInfo", {}).get("type") == "DT_INT8"
    }
    return MnnGraph(
        ops=tuple(_op(record, names, scales) for record in document["oplists"]),
        outputs=tuple(document.get("outputName", [])),
        scales=scales,
        uuid=document.get("mnn_uuid", ""),
        biz_code=document.get("bizCode", ""),
        version=document.get("extraInfo", {}).get("version", ""),
        subgraphs=len(document.get("subgraphs", [])),
    )


def _op(record: Mapping[str, Any], names: list[str], scales: Mapping[str, float]) -> MnnOp:
    main = record.get("main", {})
    inputs = tuple(names[i] for i in record.get("inputIndexes", []))
    outputs = tuple(names[i] for i in record.get("outputIndexes", []))
    kind, quantised = record["type"], main.get("quanParameter") or {}
    weight_type = _WEIGHT_TYPES.get(quantised.get("type", 0), "float32") if kind in _WEIGHTED else None
    common = main.get("common", {})
    return MnnOp(
        name=record.get("name", ""),
        type=f"{kind}.{main['opType']}" if kind in ("UnaryOp", "BinaryOp") else kind,
        inputs=inputs,
        outputs=outputs,
        weight_type=weight_type,
        weight_bits={"float32": 32, "float16": 16, "int8": quantised.get("aMaxOrBits")}.get(
            weight_type or ""
        ),
        weight_scales=int(quantised.get("alpha", 0)),
        int8="symmetricQuan" in main and weight_type == "int8" and {inputs[0], outputs[0]} <= set(scales),
        activation="relu6" if common.get("relu6") else "relu" if common.get("relu") else None,
    )
