"""Compression parameters name each layer as the converter will: by its output after fusion."""

import json

import onnx
import pytest
from onnx import TensorProto, helper

from fleet.device.errors import EngineError
from tasks.mnn.compression import compression
from tasks.mnn.int8_record import int8_layers
from tasks.nn.quantized import LayerScales


def clip(low: float, high: float) -> list[onnx.NodeProto]:
    """Clip(low, high) of `conv` as torch exports it, with its limits as constants."""
    limits = [
        helper.make_node(
            "Constant", [], [name], value=helper.make_tensor(name, TensorProto.FLOAT, [], [value])
        )
        for name, value in (("low", low), ("high", high))
    ]
    return [*limits, helper.make_node("Clip", ["conv", "low", "high"], ["after"])]


# What follows the convolution -> the tensor by which the converter finds it.
FOLLOWERS = {
    "relu": ([helper.make_node("Relu", ["conv"], ["after"])], "after"),
    "relu6": (clip(0.0, 6.0), "after"),
    "another clip": (clip(0.0, 1.0), "conv"),
    "hardswish": ([helper.make_node("HardSwish", ["conv"], ["after"])], "conv"),
    "relu and another reader": (
        [helper.make_node("Relu", ["conv"], ["r"]), helper.make_node("Add", ["r", "conv"], ["after"])],
        "conv",
    ),
}
SCALES = LayerScales(layer="block.0", input_step=0.5, output_step=0.25, weight_steps=(0.1, 0.2))


def write_model(nodes, path):
    """input -> Conv `conv` with weights `block.0.weight` -> nodes -> after."""
    conv = helper.make_node("Conv", ["input", "block.0.weight"], ["conv"])
    weight = helper.make_tensor("block.0.weight", TensorProto.FLOAT, [2, 3, 1, 1], [1.0] * 6)
    shape = helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, 4, 4])
    out = helper.make_tensor_value_info("after", TensorProto.FLOAT, [1, 2, 4, 4])
    graph = helper.make_graph([conv, *nodes], "g", [shape], [out], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))


@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_layer_is_named_by_its_fused_output(name, tmp_path):
    """Relu and Clip(0, 6) are fused if they are the only reader; nothing else is."""
    nodes, expected = FOLLOWERS[name]
    write_model(nodes, tmp_path / "m.onnx")
    assert compression(tmp_path / "m.onnx", [SCALES]).int8_tensors == (expected,)


def test_scales_arrive_as_the_converter_reads_them(tmp_path):
    """The file follows the schema, and reading it back gives the layer's scales."""
    write_model(FOLLOWERS["relu"][0], tmp_path / "m.onnx")
    told = compression(tmp_path / "m.onnx", [SCALES])
    (tmp_path / "c.json").write_text(json.dumps(told.parameters))
    (layer,) = int8_layers(tmp_path / "c.json")
    assert (layer.output, layer.input_scale, layer.output_scale) == ("after", 0.5, 0.25)
    assert layer.weight_scales == (0.1, 0.2)
    record = told.parameters["algo"][0]["quantParams"]["layer"][0]
    assert (record["input"][0]["name"], record["weight"][0]["name"]) == ("input", "block.0.weight")
    assert {side[0]["clampMin"] for side in record.values()} == {-127}


def test_a_layer_that_is_not_in_the_graph_is_an_error(tmp_path):
    """Left to the converter it would silently stay float."""
    write_model(FOLLOWERS["relu"][0], tmp_path / "m.onnx")
    lost = LayerScales(layer="block.1", input_step=1.0, output_step=1.0, weight_steps=(1.0,))
    with pytest.raises(EngineError, match=r"0 convolutions have the weights block\.1\.weight"):
        compression(tmp_path / "m.onnx", [lost])
