"""The dumped graph as records: what is stored how, read back from the file that was written."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conversion_models import node, two_conv_layers, two_convs, write_compression, write_model

from tasks.mnn import converter
from tasks.mnn.converter import ConvertOptions, convert, dump
from tasks.mnn.graph import MnnOp, parse_graph
from tasks.mnn.source import read_source


def _layers(onnx: Path, options: ConvertOptions) -> list[MnnOp]:
    return [op for op in dump(convert(onnx, onnx.with_suffix(".mnn"), options).path).ops if op.weight_type]


@pytest.mark.parametrize(
    ("options", "stored", "bytes_each"),
    [
        (ConvertOptions(), ("float32", 32), 4),
        (ConvertOptions(fp16=True), ("float16", 16), 2),
    ],
    ids=["fp32", "fp16"],
)
def test_float_weights_are_seen_with_their_width(
    options: ConvertOptions, stored: tuple[str, int], bytes_each: int, tmp_path: Path
) -> None:
    """Each convolution's stored bytes are its weights times the width; activations are fused."""
    layers = _layers(two_convs(tmp_path / "m.onnx", width=16), options)
    assert [(op.weight_type, op.weight_bits) for op in layers] == [stored] * 3
    assert [op.weight_bytes for op in layers] == [bytes_each * n for n in (16 * 3 * 9, 16 * 9, 5 * 16)]
    assert [op.activation for op in layers] == ["relu", "relu6", None]
    assert not any(op.int8 for op in layers)


def test_weight_only_int8_has_scales_and_no_int8_arithmetic(tmp_path: Path) -> None:
    """8-bit weights alone do not make a layer int8."""
    layers = _layers(two_convs(tmp_path / "m.onnx"), ConvertOptions(weight_bits=8))
    assert [(op.weight_type, op.weight_bits, op.int8) for op in layers] == [("int8", 8, False)] * 3
    assert all(op.weight_scales for op in layers)


def test_int8_layers_carry_the_scales_that_were_asked(tmp_path: Path) -> None:
    """Weight scales are read back exactly, tensor scales to six decimals."""
    records = two_conv_layers()
    records[0]["weight"][0]["scales"] = [0.001 * (i + 1) for i in range(8)]
    parameters = write_compression(tmp_path / "q.json", records)
    onnx = two_convs(tmp_path / "m.onnx")
    graph = dump(convert(onnx, tmp_path / "m.mnn", ConvertOptions(compression=parameters)).path)
    first, second, third = (op for op in graph.ops if op.weight_type)
    np.testing.assert_array_equal(
        np.float32(first.weight_scales), np.float32(records[0]["weight"][0]["scales"])
    )
    assert (first.int8, second.int8, third.int8) == (True, True, False)
    assert third.weight_type == "float32"
    assert graph.scales["relu1"] == 0.03
    assert graph.scales["clip2"] == pytest.approx(6 / 127, abs=1e-6)


def test_moving_the_weights_out_changes_nothing_else(tmp_path: Path) -> None:
    """The quick dump, of a copy with external weights, shows the graph the dump of the file itself shows."""
    onnx = two_convs(tmp_path / "m.onnx")
    parameters = write_compression(tmp_path / "q.json", two_conv_layers())
    options = ConvertOptions(compression=parameters, weight_bits=8)
    mnn = convert(onnx, tmp_path / "m.mnn", options).path
    whole = tmp_path / "whole.json"
    converter._run(
        ["convert", "-f", "MNN", "--modelFile", str(mnn), "--JsonFile", str(whole)], tmp_path, "m", 60
    )
    slow, quick = parse_graph(whole.read_text(encoding="utf-8"), b""), dump(mnn)

    def skeleton(op: MnnOp) -> MnnOp:
        return replace(op, weight_type=None, weight_bits=None, weight_bytes=0, weight_scales=(), int8=False)

    assert [skeleton(op) for op in quick.ops] == [skeleton(op) for op in slow.ops]
    assert (quick.scales, quick.outputs, quick.uuid) == (slow.scales, slow.outputs, slow.uuid)
    assert quick.biz_code == "edgeloop"


def test_numbers_that_are_no_json_are_read(tmp_path: Path) -> None:
    """The dump prints nan and inf as C++ does; names that look alike stay names."""
    text = (
        '{ "oplists": \n[ \n{ "main_type": "Relu6", "main": \n{ "minValue": 0.0, "maxValue": inf }\n'
        ', "name": "[ nan, ]", "outputIndexes": \n[ 0 ]\n, "type": "ReLU6" }\n ]\n'
        ', "tensorName": \n[ "a" ]\n, "mnn_uuid": "u" }'
    )
    (op,) = parse_graph(text, b"").ops
    assert op.attributes == {"minValue": 0.0, "maxValue": float("inf")}
    assert op.outputs == ("a",)


def test_the_source_tells_constants_inputs_and_sole_readers(tmp_path: Path) -> None:
    """Initialisers and Constant nodes are constants; a tensor that leaves the graph has no sole reader."""
    nodes = [
        node("Conv", ["x", "w"], "c"),
        node("Relu", ["c"], "r"),
        node("Add", ["r", "b"], "y"),
    ]
    rng = np.random.default_rng(0)
    constants = {"w": rng.normal(size=(4, 3, 1, 1)).astype(np.float32), "b": np.float32([1]).reshape(())}
    path = write_model(
        tmp_path / "m.onnx", nodes, constants, inputs={"x": ["n", 3, 8, 8]}, outputs=["r", "y"]
    )
    source = read_source(path)
    assert source.inputs == {"x": (-1, 3, 8, 8)}
    assert set(source.constants) == {"w", "b"}
    assert [source.weights_of(node) for node in source.model.graph.node] == [["w"], [], []]
    assert source.sole_reader("c") is not None
    assert source.sole_reader("r") is None
    assert source.op_counts == {"Conv": 1, "Relu": 1, "Add": 1}
