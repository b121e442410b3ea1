"""What `edgeloop convert` says to people: the result on stdout, what it is doing on stderr."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from onnx_graphs import graph, node, save, weights
from PIL import Image

from fleet.device.errors import UserError
from tasks.mnn import onnx_steps
from tasks.mnn.any_onnx import convert_any
from tasks.mnn.onnx_layers import float_layers
from tasks.mnn.onnx_summary import summary
from tasks.mnn.request import ConvertOptions


def _network(batch=1):
    """Two convolutions that can be int8 and one layer of each kind that cannot."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b w1", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "d"),
        node("Conv", "d w2", "e", pads=[1, 1, 1, 1], group=8),
        node("Relu", "e", "f"),
        node("Conv", "f w3", "g", pads=[1, 1, 1, 1], group=2),
        node("GlobalAveragePool", "g", "h"),
        node("Conv", "h w4", "i"),
        node("Flatten", "i", "j"),
        node("Gemm", "j w5", "y"),
    ]
    constants = {
        "w0": weights(8, 3, 3, 3),
        "w1": weights(8, 8, 3, 3, seed=1, scale=0.2),
        "w2": weights(8, 1, 3, 3, seed=2),
        "w3": weights(8, 4, 3, 3, seed=3, scale=0.2),
        "w4": weights(8, 8, 1, 1, seed=4),
        "w5": weights(8, 5, seed=5),
    }
    return graph(nodes, [("x", [batch, 3, 16, 16])], [("y", [batch, 5])], constants)


@pytest.fixture
def images(tmp_path):
    """A folder of 20 smooth pictures, all different."""
    folder, rng = tmp_path / "images", np.random.default_rng(0)
    folder.mkdir()
    for number in range(20):
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        coarse.resize((16, 16), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return folder


def test_int8_is_summed_up_with_the_layers_that_stayed_float_and_why(tmp_path, images, capsys):
    """Sizes before and after, each float layer by its name and reason, the proof, and what comes next."""
    out = tmp_path / "my model.mnn"
    result = convert_any(save(_network(), tmp_path / "m.onnx"), out, int8=True, calibration=images)
    assert result.ok, result.reason
    lines = summary(result).splitlines()
    assert re.fullmatch(rf"wrote {re.escape(str(out))}: [\d.]+ kB, \d+% of the ONNX's [\d.]+ kB", lines[0])
    assert "  int8: 2" in lines
    pooled = "it reads a GlobalAveragePool, which the engine rounds wrongly in int8"
    floats = [line.strip() for line in lines if line.startswith("  float:")]
    assert floats == [
        "float: 1 Conv, because it reads the model's input: Conv_a",
        "float: 1 Conv, because it is a grouped convolution (group=2): Conv_g",
        f"float: 1 Conv, because {pooled}: Conv_i",
        "float: 1 Gemm, because the engine has no int8 Gemm with learned scales: Gemm_y",
    ]
    runs, error = result.parity.runs, result.parity.max_rel_error
    assert f"proven against ONNX Runtime: {runs} runs at x=1,3,16,16" in lines
    assert any(f"largest error {error:.2g} of an output's range (at most " in line for line in lines)
    assert any(line.startswith("  - calibrated on 20 images") for line in lines)
    assert lines[-2:] == [
        "next: count its top-1 on your own test set",
        f"next: measure it on this host: edgeloop bench '{out}'",
    ]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("convert: ")]
    assert said[0] == "convert: ONNX Runtime computes the reference"
    assert "convert: the converter writes int8, and it is audited" in said


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        (ConvertOptions(), "fp32 weights"),
        (ConvertOptions(fp16=True), "fp16 weights"),
        (ConvertOptions(weight_bits=8), "int8 weights"),
    ],
)
def test_other_storages_say_that_all_computes_in_float(tmp_path, options, stored):
    """No int8 was asked for: only how weights are stored is said; the converter made two layers of one."""
    result = convert_any(save(_network(), tmp_path / "m.onnx"), tmp_path / "m.mnn", options=options, runs=2)
    assert result.ok, result.reason
    text = summary(result)
    assert f"layers with weights: 7 (7 with {stored})\n  all compute in float\n" in text
    assert "because" not in text


def test_a_refusal_says_what_and_why(tmp_path):
    """The operator to replace, the reason, and that nothing was written."""
    model = graph([node("Mish", "x", "y")], [("x", [1, 3, 8, 8])], [("y", None)], opset=18)
    result = convert_any(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn")
    lines = summary(result).splitlines()
    assert lines[0] == f"refused: {tmp_path / 'm.onnx'}; nothing was written"
    assert lines[1] == f"why: {result.reason}"
    assert lines[2] == "at fault: Mish"
    assert "float" not in result.reason


def test_an_int8_that_goes_wrong_says_that_float_does_not(tmp_path, images):
    """Whoever asked for int8 learns that the model converts without it."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1, 1, 1, 1]),
        node("Conv", "a w1", "b", pads=[1, 1, 1, 1]),
        node("Neg", "b", "y"),
    ]
    uneven = weights(8, 3, 3, 3) * np.float32([1e4, *[1] * 7]).reshape(8, 1, 1, 1)  # one scale for all
    blind = weights(4, 8, 3, 3, seed=1)
    blind[:, 0] = 0  # the large one is not read
    model = graph(nodes, [("x", [1, 3, 16, 16])], [("y", None)], {"w0": uneven, "w1": blind})
    path = save(model, tmp_path / "m.onnx")
    result = convert_any(path, tmp_path / "m.mnn", int8=True, calibration=images)
    assert not result.ok
    assert result.reason.endswith("in float it is proven: leave --int8 out, or try --weight-bits 8")
    assert convert_any(path, tmp_path / "m.mnn", runs=2).ok


def test_layers_named_in_someones_compression_parameters_are_not_called_float():
    """A name behind a batch norm and an activation counts; a layer left out is told as left out."""
    one = np.ones(4, np.float32)
    nodes = [
        node("Conv", "x w0", "a"),
        node("BatchNormalization", "a s s s s", "b"),
        node("Relu", "b", "c"),
        node("Conv", "c w1", "d"),
        node("BatchNormalization", "d s s s s", "e"),
        node("Relu", "e", "f"),
        node("Conv", "f w1", "g"),
        node("Neg", "g", "y"),
    ]
    constants = {"w0": weights(4, 3, 1, 1), "w1": weights(4, 4, 1, 1), "s": one}
    model = graph(nodes, [("x", [1, 3, 8, 8])], [("y", None)], constants)
    assert [(f.name, f.why) for f in float_layers(model, {"f"})] == [
        ("Conv_a", "it reads the model's input"),
        ("Conv_g", "the compression parameters do not name it"),
    ]


def test_a_long_step_is_told_again_in_a_log(monkeypatch, capsys):
    """A pipe gets a line at the start and one now and then, none after the end."""
    monkeypatch.setattr(onnx_steps, "STILL_EVERY_S", 0.05)
    with onnx_steps.step("waiting"):
        while "waiting: 0 s" not in (said := capsys.readouterr().err):
            time.sleep(0.02)
    assert said
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "got", "next_step"),
    [
        ({"int8": True}, "--int8 without --calibration", "add --calibration FOLDER"),
        ({"calibration": "absent"}, "--calibration absent, which is no folder", "correct the path"),
    ],
)
def test_options_are_answered_each_by_its_own_words(tmp_path, arguments, got, next_step):
    """What to do fits what was wrong."""
    if "calibration" in arguments:
        arguments = {"calibration": Path(arguments["calibration"])}
    with pytest.raises(UserError) as refused:
        convert_any(save(_network(), tmp_path / "m.onnx"), tmp_path / "m.mnn", **arguments)
    assert (refused.value.got, refused.value.next_step) == (got, next_step)


def test_a_path_without_a_file_names_the_models_there_are(tmp_path):
    """A typing error is not answered with advice on exporting."""
    save(_network(), tmp_path / "model.onnx")
    (tmp_path / "folder.onnx").mkdir()
    for name, got in (
        ("modle.onnx", "there is no file"),
        ("folder.onnx", "no file but a folder"),
        ("none/m.onnx", "nor the folder"),
        ("m" * 5000, "File name too long"),
    ):
        with pytest.raises(UserError, match=got) as refused:
            convert_any(tmp_path / name, tmp_path / "m.mnn")
        assert refused.value.next_step == "correct the path"
    with pytest.raises(UserError, match=r"has model\.onnx"):
        convert_any(tmp_path / "modle.onnx", tmp_path / "m.mnn")
