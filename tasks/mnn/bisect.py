"""Naming the first layer at which the engine leaves its reference.

The reference is the ONNX graph in ONNX Runtime with every tensor fetched, or any other source of tensors by
name, such as a fake-quant model. Engine operators are found by name: MNN names one after the ONNX tensor
it computes, before the activation or batch norm it was fused with.
"""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from fleet.device.engine import Session
from fleet.device.errors import EngineError
from tasks.mnn.compare import Array, Comparison, compare

TensorSource = Callable[[Sequence[str]], Mapping[str, Array]]
"""Tensor names (ONNX) -> their values for one fixed input; names it does not have are left out."""

# ONNX Runtime's exceptions have no base class of their own.
_ORT_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
# Layers whose tensors are held at one time: 32 of MobileNet's at 224 px are about 60 MB.
_CHUNK = 32
# No layer is blamed for a hundredth of the final error: MNN approximates some functions, e.g. GELU by 4e-4.
_LEAST_BLAME = 0.01
# What MNN folds into the operator before it, which keeps its own name.
_FUSED_INTO_PRODUCER = {"BatchNormalization", "Relu", "Clip", "Identity", "Dropout"}
# Geometry turns one operator into several: suffixes of the parts.
_PART_SUFFIX = re.compile(r"(__matmul_converted)?(_raster_\d+)?$")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One engine operator and the ONNX tensor it should have computed."""

    nodes: tuple[str, ...]
    """Names of the ONNX nodes it stands for (their output's name where a node has none), in order."""
    op_type: str
    """Their operators, e.g. Conv+Relu."""
    tensor: str
    """The ONNX tensor to compare with: the end of the fused chain."""
    engine_op: str
    """The operator in the engine; empty for a graph output that no operator is named after."""

    @property
    def name(self) -> str:
        """The first node's name."""
        return self.nodes[0]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where the engine first leaves the reference."""

    layer: Layer
    comparison: Comparison
    last_good: Layer | None
    """The nearest layer before it that still agrees; None where it reads the graph's inputs."""
    unobserved: tuple[str, ...]
    """Nodes between the two that the engine did not execute under a name: one of them may be the culprit."""
    layers_compared: int

    def __str__(self) -> str:
        parts = [
            f"first diverging layer {self.layer.name} ({self.layer.op_type})",
            self.comparison.reason or f"relative error {self.comparison.max_rel_error:.2g}",
            f"last good layer {self.last_good.name}" if self.last_good else "no layer before it",
            f"{self.layers_compared} layers compared",
        ]
        if self.unobserved:
            parts.insert(1, f"or, unobservable before it, {', '.join(self.unobserved)}")
        return "; ".join(parts)


def first_divergence(
    onnx_path: Path,
    mnn_path: Path,
    feeds: Mapping[str, Array],
    *,
    tolerance: float,
    reference: TensorSource | None = None,
) -> Divergence | None:
    """Find the first layer whose error exceeds `tolerance` and reaches a graph output.

    Every layer that can be matched is compared, in chunks, and the search goes backwards from the wrong
    output: a layer counts only if all compared layers between it and the output are wrong too. (Halving the
    graph would need errors that never vanish again; a ReLU or a saturating layer hides them.)

    Args:
        onnx_path: The graph that was converted.
        mnn_path: Its conversion.
        feeds: One input for each graph input, dtype and shape as in the ONNX graph.
        tolerance: Largest admissible `Comparison.max_rel_error` of a layer.
        reference: Where the right values come from; default: ONNX Runtime on `onnx_path`.

    Returns:
        The divergence, or None when all graph outputs agree.

    Raises:
        EngineError: ONNX Runtime or MNN cannot run the model.
    """
    graph = onnx.load(str(onnx_path)).graph
    with Session(mnn_path, shapes={k: v.shape for k, v in feeds.items()}) as session:
        outputs, ops = session.trace(feeds)
        layers = match_layers(graph, [op.name for op in ops])
        source = reference or onnx_tensors(onnx_path, feeds)
        results: dict[str, Comparison] = {}
        for chunk in _chunks(layers):
            got = session.intermediates(feeds, {layer.engine_op for layer in chunk})
            want = source([layer.tensor for layer in chunk])
            for layer in chunk:
                engine_value = got.get(layer.engine_op, outputs.get(layer.tensor))
                result = _compare_layer(engine_value, want.get(layer.tensor))
                if result is not None:
                    results[layer.tensor] = result
    return _search_backwards(graph, layers, results, tolerance)


def match_layers(graph: onnx.GraphProto, engine_ops: Sequence[str]) -> list[Layer]:
    """The engine's operators that stand for ONNX nodes, in the graph's order; graph outputs are among them.

    Args:
        graph: The ONNX graph.
        engine_ops: Names of the operators that ran, in order, as the engine reports them.
    """
    # Of an operator's parts the last holds its result; the operator itself comes after its inputs' parts.
    last_part = {_PART_SUFFIX.sub("", name): name for name in engine_ops}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for tensor in node.input:
            readers.setdefault(tensor, []).append(node)
    graph_outputs = {output.name for output in graph.output}

    layers: list[Layer] = []
    for node in graph.node:
        chain = [node]
        while node.output[0] in last_part and chain[-1].output[0] not in graph_outputs:
            consumers = readers.get(chain[-1].output[0], [])
            fused = len(consumers) == 1 and consumers[0].op_type in _FUSED_INTO_PRODUCER
            if not fused or consumers[0].output[0] in last_part:
                break
            chain.append(consumers[0])
        tensor = chain[-1].output[0]
        if node.output[0] in last_part or tensor in graph_outputs:
            layers.append(
                Layer(
                    nodes=tuple(_name(part) for part in chain),
                    op_type="+".join(part.op_type for part in chain),
                    tensor=tensor,
                    engine_op=last_part.get(node.output[0], ""),
                )
            )
    return layers


def onnx_tensors(onnx_path: Path, feeds: Mapping[str, Array]) -> TensorSource:
    """Any tensor of an ONNX graph, computed by ONNX Runtime without optimisation.

    Raises:
        EngineError: ONNX Runtime cannot load the graph, or, when asked for tensors, cannot run it.
    """
    model = onnx.load(str(onnx_path))
    present = {output.name for output in model.graph.output}
    names = [tensor for node in model.graph.node for tensor in node.output if tensor]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except _ORT_ERRORS as error:
        raise EngineError(
            f"{onnx_path.name} does not load in ONNX Runtime", engine_said=str(error)
        ) from error

    def fetch(wanted: Sequence[str]) -> Mapping[str, Array]:
        known = [name for name in wanted if name in names]
        try:
            values = session.run(known, dict(feeds)) if known else []
        except _ORT_ERRORS as error:
            raise EngineError(
                f"{onnx_path.name} does not run in ONNX Runtime", engine_said=str(error)
            ) from error
        return dict(zip(known, values, strict=True))

    return fetch


def _chunks(layers: Sequence[Layer]) -> Iterator[Sequence[Layer]]:
    for start in range(0, len(layers), _CHUNK):
        yield layers[start : start + _CHUNK]


def _compare_layer(got: Array | None, want: Any) -> Comparison | None:
    """None where the two cannot be laid over each other: the engine keeps some tensors in another shape."""
    if got is None or want is None or not isinstance(want, np.ndarray):
        return None
    if [n for n in got.shape if n != 1] != [n for n in want.shape if n != 1]:
        return None
    return compare(got.reshape(want.shape), want)


def _search_backwards(
    graph: onnx.GraphProto, layers: Sequence[Layer], results: Mapping[str, Comparison], tolerance: float
) -> Divergence | None:
    compared = {layer.tensor: layer for layer in layers if layer.tensor in results}
    order = {layer.tensor: i for i, layer in enumerate(layers)}
    upstream = _Upstream(graph)
    outputs = [output.name for output in graph.output if output.name in results]
    errors = [results[name].max_rel_error for name in outputs]
    if not any(error > tolerance for error in errors):
        return None
    finite = [min(error, 1.0) for error in errors if tolerance < error < math.inf]
    blame = max(tolerance, _LEAST_BLAME * min(finite, default=0.0))

    def wrong(names: Iterable[str]) -> list[str]:
        return sorted((n for n in names if results[n].max_rel_error > blame), key=order.__getitem__)

    current = wrong(outputs)[0]
    while earlier := wrong(upstream.nearest(current, compared)[0]):
        current = earlier[0]
    before, passed = upstream.nearest(current, compared)
    good = sorted(before, key=order.__getitem__)
    own = set(compared[current].nodes)
    return Divergence(
        layer=compared[current],
        comparison=results[current],
        last_good=compared[good[-1]] if good else None,
        unobserved=tuple(f"{_name(node)} ({node.op_type})" for node in passed if _name(node) not in own),
        layers_compared=len(compared),
    )


class _Upstream:
    """Walking an ONNX graph against the flow of data."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._nodes = list(graph.node)
        weights = {weight.name for weight in graph.initializer}
        data = {graph_input.name for graph_input in graph.input} - weights
        self._producer: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            # Constants and shape arithmetic carry no pixels: walking through them would only add noise.
            if node.op_type not in ("Shape", "Size") and not data.isdisjoint(node.input):
                data.update(node.output)
                self._producer.update(dict.fromkeys(node.output, index))

    def nearest(self, tensor: str, known: Container[str]) -> tuple[set[str], list[onnx.NodeProto]]:
        """The nearest `known` tensors `tensor` is computed from, and the nodes passed on the way to them."""
        found: set[str] = set()
        passed: set[int] = set()
        waiting = [tensor]
        while waiting:
            name = waiting.pop()
            if name in known and name != tensor:
                found.add(name)
            elif name in self._producer and self._producer[name] not in passed:
                passed.add(self._producer[name])
                waiting += self._nodes[self._producer[name]].input
        return found, [self._nodes[index] for index in sorted(passed)]


def _name(node: onnx.NodeProto) -> str:
    return str(node.name or node.output[0])
