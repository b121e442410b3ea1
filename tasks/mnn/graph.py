"""A converted model's graph as records, parsed from the converter's JSON dump.

The dump spells out every number, so it is taken of a copy whose weights were moved to a file beside it: a
ResNet-18 takes 0.4 s instead of 6. `external` in a layer then says where its weights lie in that file.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

WeightType = Literal["float32", "float16", "int8"]
Scalar = str | int | float | bool

_NOT_JSON = re.compile(r"(?<=[ \[])(-?)(nan|inf)(?=[,\s])")  # how the converter prints them
_WEIGHT_TYPES: dict[int, WeightType] = {1: "int8", 3: "float16"}  # by IDSTQuan.type
_WEIGHT_BITS = {"float32": 32, "float16": 16}
_PASSIVE = frozenset({"Input", "Const"})


@dataclass(frozen=True, kw_only=True)
class MnnOp:
    """One operator of the converted graph."""

    name: str
    """Output tensor of the ONNX node it came from, before anything was fused into it."""
    type: str
    """MNN's type; for unary and binary operators with the function, e.g. UnaryOp.HARDSWISH."""
    inputs: tuple[str, ...]
    """Tensor names."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Scalar]
    """Its scalar parameters under MNN's names; for a convolution those of `common`."""
    weight_type: WeightType | None
    """How the weights are stored; None for an operator without any."""
    weight_bits: int | None
    weight_bytes: int
    weight_scales: tuple[float, ...]
    """Of quantised weights: one per output channel, or minimum and scale of each when asymmetric."""
    int8: bool
    """Whether the model asks for int8 arithmetic: weights, input and output all carry scales."""

    @property
    def activation(self) -> str | None:
        """The fused activation: relu, relu6 or None."""
        return next((key for key in ("relu6", "relu") if self.attributes.get(key) is True), None)


@dataclass(frozen=True, kw_only=True)
class MnnGraph:
    """The converted graph without the bodies of If and While."""

    ops: tuple[MnnOp, ...]
    """In the engine's order, Input and Const included."""
    outputs: tuple[str, ...]
    scales: Mapping[str, float]
    """Tensor name to its int8 scale, to six decimals."""
    uuid: str
    biz_code: str
    version: str
    """Of the converter that wrote it."""

    @property
    def op_counts(self) -> Counter[str]:
        """Operators that compute, by type."""
        return Counter(op.type for op in self.ops if op.type not in _PASSIVE)


def parse_graph(dump: str, weights: bytes) -> MnnGraph:
    """Build the records.

    Args:
        dump: The JSON dump of a model with external weights.
        weights: The contents of the file its `external` fields point into.
    """
    document = json.loads(_NOT_JSON.sub(lambda m: m[1] + {"nan": "NaN", "inf": "Infinity"}[m[2]], dump))
    names = document.get("tensorName", [])
    scales = {
        names[entry["index"]]: float(entry["quantInfo"]["scale"])
        for entry in document.get("extraTensorDescribe", [])
        if entry.get("quantInfo", {}).get("type") == "DT_INT8"
    }
    return MnnGraph(
        ops=tuple(_op(record, names, scales, weights) for record in document["oplists"]),
        outputs=tuple(document.get("outputName", [])),
        scales=scales,
        uuid=document.get("mnn_uuid", ""),
        biz_code=document.get("bizCode", ""),
        version=document.get("extraInfo", {}).get("version", ""),
    )


def _op(record: Mapping[str, Any], names: list[str], scales: Mapping[str, float], weights: bytes) -> MnnOp:
    main, kind = record.get("main", {}), record["type"]
    inputs = tuple(names[i] for i in record.get("inputIndexes", []))
    outputs = tuple(names[i] for i in record.get("outputIndexes", []))
    quantised, external = main.get("quanParameter") or {}, main.get("external", [])
    has_weights = record.get("main_type") == "Convolution2D" and len(external) > 1
    weight_type = _WEIGHT_TYPES.get(quantised.get("type", 0), "float32") if has_weights else None
    scaled = bool(inputs and outputs) and inputs[0] in scales and outputs[0] in scales
    alpha = b""
    if weight_type == "int8":  # external: offset, bytes of the weights, bytes of their scales, ...
        start = external[0] + external[1]
        alpha = weights[start : start + external[2]]
    return MnnOp(
        name=record.get("name", ""),
        type=f"{kind}.{main['opType']}" if kind in {"UnaryOp", "BinaryOp"} else kind,
        inputs=inputs,
        outputs=outputs,
        attributes={k: v for k, v in main.get("common", main).items() if isinstance(v, Scalar)},
        weight_type=weight_type,
        weight_bits=_WEIGHT_BITS.get(weight_type, quantised.get("aMaxOrBits")) if weight_type else None,
        weight_bytes=external[1] if weight_type else 0,
        weight_scales=tuple(np.frombuffer(alpha, "<f4").tolist()),
        int8="symmetricQuan" in main and weight_type == "int8" and scaled,
    )
