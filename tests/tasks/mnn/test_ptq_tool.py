"""MNN's own quantisation tool, run for real: what it makes is int8, or an error says why not."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from golden_digits import parent, write_workspace

from fleet.device.errors import EngineError, UserError
from tasks.data.dataset import Dataset
from tasks.int8_trial import ask_engine
from tasks.mnn import ptq_tool
from tasks.mnn.converter import dump
from tasks.mnn.ptq_tool import METHODS, audit_tool, layer_tensors, quantise

VARIANT = "mbv3s-p30-fp32-r48"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return write_workspace(tmp_path_factory.mktemp("golden") / "w")


@pytest.fixture(scope="module")
def onnx(workspace):
    return workspace / "models/export" / VARIANT / "model.onnx"


@pytest.fixture(scope="module")
def images(workspace):
    return Dataset.open(workspace / "data/prepared").split("calibration").images(range(16))


@pytest.mark.parametrize("method", METHODS)
def test_each_method_makes_an_int8_model_that_works(method, workspace, onnx, images, tmp_path):
    """Layers are int8, operators ran in int8, and the model still knows digits (KL clips them: 80 %)."""
    pre, out = parent().preprocess, tmp_path / "model.mnn"
    skip = tuple(layer_tensors(onnx, ("features.0.0", "classifier.3")))
    made = quantise(onnx, images, pre, out, method, skip=skip)
    answers = ask_engine(out, pre, Dataset.open(workspace / "data/prepared").split("test"), method)
    assert len(made.int8_layers) >= 52
    assert answers.int8_ops_count == made.int8_ops_count > 52
    assert answers.top1 > (0.8 if method == "KL" else 0.9)
    assert len(made.int8_layers) + len(made.float_layers) == 54
    # EMA does not read the list; that is said, not hidden.
    assert len(made.not_skipped) == (2 if method == "EMA" else 0)
    assert len(skip) == 2


def test_the_same_images_give_the_same_scales(onnx, images, tmp_path):
    """A second run of KL is the first, but for the model's uuid."""
    pre = parent().preprocess
    scales = []
    for number in range(2):
        quantise(onnx, images, pre, tmp_path / f"{number}.mnn", "KL")
        scales.append(dump(tmp_path / f"{number}.mnn").scales)
    assert scales[0] == scales[1]
    assert len(scales[0]) > 100


def test_other_images_give_other_scales(onnx, images, tmp_path):
    """The tool reads the images it is given: noise is not digits."""
    pre = parent().preprocess
    noise = np.random.default_rng(0).integers(0, 256, images.shape, np.uint8)
    assert len(quantise(onnx, images, pre, tmp_path / "a.mnn", "KL").int8_layers) == 54
    quantise(onnx, noise, pre, tmp_path / "b.mnn", "KL")
    ours, theirs = dump(tmp_path / "a.mnn").scales, dump(tmp_path / "b.mnn").scales
    assert set(ours) == set(theirs)
    assert sum(abs(ours[name] - theirs[name]) > 0.05 * theirs[name] for name in ours) > 50


def test_done_while_still_float_is_an_error(workspace, tmp_path):
    """A graph without int8 is refused however content the tool was, with the layers named."""
    graph = dump(workspace / "models/mnn" / VARIANT / "model.mnn")
    plain = [op for op in graph.ops if op.weight_type]
    with pytest.raises(EngineError, match=r"0 of the 54 layers asked for are int8; still float: /features"):
        audit_tool(graph, plain, [], "KL")
    some = replace(graph, ops=tuple(replace(op, int8=op is not plain[3]) for op in graph.ops))
    with pytest.raises(EngineError, match=f"53 of the 54 layers .* still float: {plain[3].name}"):
        audit_tool(some, plain, [], "KL")
    assert audit_tool(some, plain, [plain[3].name], "KL")["not_skipped"] == ()


def test_a_scale_that_is_no_number_is_an_error(workspace):
    """NaN ranges would be carried into every answer."""
    graph = dump(workspace / "models/mnn" / "mbv3s-p30-i8-r48" / "model.mnn")
    broken = replace(graph, scales=dict(graph.scales) | {next(iter(graph.scales)): float("nan")})
    with pytest.raises(EngineError, match="no numbers"):
        audit_tool(broken, [op for op in graph.ops if op.int8], [], "EMA")


def test_no_images_and_no_time_are_said(onnx, images, tmp_path):
    """Nothing is written, and the error says what ended the tool."""
    pre = parent().preprocess
    with pytest.raises(UserError, match="0 calibration images"):
        quantise(onnx, images[:0], pre, tmp_path / "x.mnn", "KL")
    with pytest.raises(EngineError, match="MNN's ADMM: ran past its limit of 2 s"):
        quantise(onnx, np.repeat(images, 20, axis=0), pre, tmp_path / "x.mnn", "ADMM", timeout_s=2)
    assert not (tmp_path / "x.mnn").exists()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("print('Error: scale is wrong'); open(sys.argv[3], 'w').write('x')", "complained"),
        ("sys.exit('the tool wrote no file')", "exited with 1"),
    ],
)
def test_what_the_tool_does_wrong_is_an_error(said, expected, onnx, images, tmp_path):
    """Crashes, complaints over a written file, and no file: each is told with the tool's words."""
    child = tmp_path / "child.py"
    child.write_text(f"import sys\n{said}\n")
    with (
        mock.patch.object(ptq_tool, "_CHILD", child),
        pytest.raises(EngineError, match=expected),
    ):
        quantise(onnx, images, parent().preprocess, tmp_path / "x.mnn", "KL")
    assert not (tmp_path / "x.mnn").exists()


def test_the_tool_gets_the_contract(images, tmp_path):
    """Mean, deviation and colour order are those of the preprocess, on the tool's scale of 0 to 255."""
    pre = replace(parent().preprocess, color_order="BGR", mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    record = json.loads(json.dumps(ptq_tool._config(tmp_path, 16, pre, "EMA", ["a"])))
    assert record["format"] == "BGR"
    assert record["mean"] == pytest.approx([25.5, 51.0, 76.5])
    assert record["normal"] == pytest.approx([2 / 255, 4 / 255, 5 / 255])
    assert record["skip_quant_op_names"] == ["a"]
    assert (record["batch_size"], record["used_image_num"]) == (16, 16)
