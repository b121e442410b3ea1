"""The search for the first diverging layer, proven with graphs in which exactly one layer was made wrong."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from fleet.device.errors import EngineError
from tasks.mnn.bisect import first_divergence, match_layers, onnx_tensors
from tasks.mnn.converter import convert

TOLERANCE = 1e-4


class Net(nn.Module):
    """Structures the search walks through: fused activations, residual, squeeze-excite, concat, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.project = nn.Conv2d(8, 8, 1)
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1)
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x_NCHW)))
        y = nn.functional.relu6(self.depthwise(x))
        y = x + self.project(y)
        gate = torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = y * nn.functional.hardsigmoid(self.excite(gate))
        y = nn.functional.hardswish(torch.cat([self.left(y), self.right(y)], 1))
        return self.head(torch.relu(self.hidden(y.mean((2, 3)))))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """(folder, graph, one input): activations of unit size, so that every layer matters to the output."""
    folder = tmp_path_factory.mktemp("bisect")
    torch.manual_seed(0)
    model = Net().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    model.norm.running_mean.normal_()
    path = folder / "good.onnx"
    torch.onnx.export(
        model,
        (torch.zeros(1, 3, 12, 12),),
        str(path),
        dynamo=False,
        opset_version=17,
        input_names=["input"],
        output_names=["logits"],
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.PRESERVE,  # keeps the batch norm as a node of its own
    )
    feeds = {"input": np.random.default_rng(1).standard_normal((1, 3, 12, 12)).astype(np.float32)}
    convert(path, folder / "good.mnn")
    return folder, path, feeds


def altered(good, edit) -> Path:
    """Convert the good graph after `edit(model)` made one layer of it wrong."""
    folder, path, _ = good
    model = onnx.load(str(path))
    edit(model)
    onnx.save(model, str(folder / "bad.onnx"))
    return convert(folder / "bad.onnx", folder / "bad.mnn").path


def weight(name, change):
    def edit(model):
        tensor = next(t for t in model.graph.initializer if t.name == name)
        tensor.CopyFrom(
            numpy_helper.from_array(change(numpy_helper.to_array(tensor)).astype(np.float32), name)
        )

    return edit


def operator(name, new_type, **attributes):
    def edit(model):
        node = next(n for n in model.graph.node if n.name == name)
        node.op_type = new_type
        del node.attribute[:]
        node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())

    return edit


def one_channel(w):
    w = w.copy()
    w[0] *= 1.2
    return w


FAULTS = {
    "/stem/Conv": weight("stem.weight", one_channel),
    "/depthwise/Conv": weight("depthwise.bias", lambda b: b + 0.05),
    "/project/Conv": weight("project.weight", lambda w: w[::-1]),
    "/Add": operator("/Add", "Sub"),
    "/ReduceMean": operator("/ReduceMean", "ReduceMax", axes=[2, 3], keepdims=1),
    "/squeeze/Conv": weight("squeeze.weight", lambda w: -w),
    "/excite/Conv": weight("excite.bias", lambda b: b + 0.2),
    "/HardSigmoid": operator("/HardSigmoid", "HardSigmoid", alpha=0.3, beta=0.5),
    "/Mul": operator("/Mul", "Add"),
    "/right/Conv": weight("right.weight", one_channel),
    "/HardSwish": operator("/HardSwish", "Relu"),
    "/hidden/Gemm": weight("hidden.weight", lambda w: w[:, ::-1]),
    "/head/Gemm": weight("head.bias", lambda b: b + 0.01 * np.eye(5)[2]),
}


def test_the_unaltered_graph_does_not_diverge(good):
    """Correct conversions are not accused."""
    folder, path, feeds = good
    assert first_divergence(path, folder / "good.mnn", feeds, tolerance=TOLERANCE) is None


@pytest.mark.parametrize("layer", FAULTS)
def test_the_altered_layer_is_named(good, layer):
    """A wrong weight, bias, channel order, operator or attribute is found at its own layer."""
    found = first_divergence(good[1], altered(good, FAULTS[layer]), good[2], tolerance=TOLERANCE)
    assert found is not None
    assert found.layer.name == layer
    assert found.comparison.max_rel_error > TOLERANCE
    assert layer in str(found)


def test_a_lost_activation_is_charged_to_the_layer_it_is_fused_with(good):
    """MNN computes Conv+BatchNorm+Relu as one operator: a ReLU that is gone shows at that layer."""
    found = first_divergence(
        good[1], altered(good, operator("/Relu", "LeakyRelu", alpha=0.5)), good[2], tolerance=TOLERANCE
    )
    assert found is not None
    assert "/Relu" in found.layer.nodes


def test_last_good_layer_is_the_one_before(good):
    """The report brackets the fault."""
    found = first_divergence(good[1], altered(good, FAULTS["/project/Conv"]), good[2], tolerance=TOLERANCE)
    assert found is not None
    assert found.last_good is not None
    assert found.last_good.nodes == ("/depthwise/Conv", "/Clip")
    assert found.last_good.op_type == "Conv+Clip"


def test_nodes_the_engine_does_not_execute_are_listed_as_suspects(good):
    """A concat is only memory layout to MNN: it is named beside the first layer that can be observed."""

    def swap(model):
        node = next(n for n in model.graph.node if n.op_type == "Concat")
        inputs = list(node.input)[::-1]
        del node.input[:]
        node.input.extend(inputs)

    found = first_divergence(good[1], altered(good, swap), good[2], tolerance=TOLERANCE)
    assert found is not None
    assert found.layer.name == "/HardSwish"
    assert found.unobserved == ("/Concat (Concat)",)


def test_an_error_that_does_not_reach_the_output_is_not_reported(good):
    """A layer may differ where nothing reads it: zeroed excite weights hide the squeeze layer."""
    folder, path, feeds = good
    model = onnx.load(str(path))
    weight("excite.weight", np.zeros_like)(model)
    muted = folder / "muted.onnx"
    onnx.save(model, str(muted))
    FAULTS["/squeeze/Conv"](model)
    onnx.save(model, str(folder / "muted_bad.onnx"))
    wrong = convert(folder / "muted_bad.onnx", folder / "muted_bad.mnn").path
    assert first_divergence(muted, wrong, feeds, tolerance=TOLERANCE) is None


def test_any_source_of_tensors_can_be_the_reference(good):
    """A fake-quant model supplies tensors by name; those it lacks are skipped."""
    folder, path, feeds = good
    ours = onnx_tensors(path, feeds)
    tensors = [node.output[0] for node in onnx.load(str(path)).graph.node]
    late = set(tensors[tensors.index("/Mul_output_0") :])

    def shifted(names):
        values = ours([n for n in names if "squeeze" not in n and "excite" not in n])
        return {k: v + 1 if k in late else v for k, v in values.items()}

    found = first_divergence(path, folder / "good.mnn", feeds, tolerance=TOLERANCE, reference=shifted)
    assert found is not None
    assert found.layer.name == "/Mul"
    assert found.layers_compared < len(tensors)


def test_fused_chains_are_matched_at_their_end(good):
    """An operator that kept its producer's name stands for the whole chain, unless its parts run alone."""
    graph = onnx.load(str(good[1])).graph
    fused = {layer.nodes[0]: layer for layer in match_layers(graph, ["/stem/Conv_output_0"])}
    assert fused["/stem/Conv"].nodes == ("/stem/Conv", "/norm/BatchNormalization", "/Relu")
    assert fused["/stem/Conv"].tensor == "/Relu_output_0"
    apart = match_layers(graph, ["/stem/Conv_output_0", "/norm/BatchNormalization_output_0"])
    assert [layer.op_type for layer in apart] == ["Conv", "BatchNormalization+Relu", "Gemm"]
    assert apart[-1].tensor == "logits"


def test_of_an_operators_parts_the_last_counts(good):
    """Geometry splits an operator: `X_raster_0` prepares it, `X` or the last part holds its result."""
    graph = onnx.load(str(good[1])).graph
    ops = ["/Mul_output_0_raster_0", "/Mul_output_0", "/hidden/Gemm_output_0__matmul_converted"]
    engine_ops = {layer.name: layer.engine_op for layer in match_layers(graph, ops)}
    assert engine_ops["/Mul"] == "/Mul_output_0"
    assert engine_ops["/hidden/Gemm"] == "/hidden/Gemm_output_0__matmul_converted"


def test_a_graph_onnx_runtime_cannot_load_is_an_engine_error(tmp_path):
    """The reference failing is an error of its own, never a verdict about the engine."""
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    info = helper.make_tensor_value_info("x", 1, [1])
    graph = helper.make_graph([node], "g", [info], [helper.make_tensor_value_info("y", 1, [1])])
    path = tmp_path / "unknown.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    with pytest.raises(EngineError, match="ONNX Runtime"):
        onnx_tensors(path, {"x": np.zeros(1, np.float32)})
