"""Any ONNX to a proven model, or a refusal that leaves nothing behind."""

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from nn.digit_set import write_digits
from onnx import TensorProto, helper
from onnx_graphs import graph, node, save, weights
from PIL import Image
from torch import nn

from fleet.device.engine import Session
from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset
from tasks.mnn.any_onnx import convert_any
from tasks.mnn.calibration import Calibration
from tasks.mnn.onnx_ptq import fold, quantisable, quantise
from tasks.mnn.onnx_read import read_onnx
from tasks.mnn.request import ConvertOptions

IMAGE = ("x", [1, 3, 16, 16])


def _conv_relu(**changes):
    return graph(
        [node("Conv", "x w", "t", pads=[1, 1, 1, 1], **changes), node("Relu", "t", "y")],
        [IMAGE],
        [("y", [1, 4, 16, 16])],
        {"w": weights(4, 3, 3, 3)},
    )


def _torchvision(name, path, size_px):
    """A random classifier with batch statistics as training leaves them, and a dynamic batch."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    names = {"input_names": ["images"], "output_names": ["logits"]}
    axes = {"images": {0: "n"}, "logits": {0: "n"}}
    image = torch.zeros(1, 3, size_px, size_px)
    torch.onnx.export(
        model.eval(), image, str(path), dynamo=False, opset_version=17, dynamic_axes=axes, **names
    )
    return path


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5"])
def test_torchvision_classifiers_are_converted(name, tmp_path):
    """A classifier with a dynamic batch is proven at two batch sizes and keeps its names."""
    result = convert_any(_torchvision(name, tmp_path / "m.onnx", 64), tmp_path / "m.mnn", runs=3)
    assert result.ok, result.reason
    assert result.parity is not None
    assert result.parity.max_rel_error < 1e-4
    assert [s["images"][0] for s in result.parity.shapes] == [1, 3]
    assert result.size_bytes == (tmp_path / "m.mnn").stat().st_size
    with Session(tmp_path / "m.mnn", shapes={"images": (2, 3, 64, 64)}) as session:
        assert session.run({"images": np.ones((2, 3, 64, 64), np.float32)})["logits"].shape == (2, 10)


def test_the_result_is_a_record_with_a_fixed_set_of_keys(tmp_path):
    """What `--json` prints: one object whether the model was converted or refused."""
    keys = {"ok", "output", "size_bytes", "ops", "unsupported", "parity", "reason"}
    good = convert_any(save(_conv_relu(), tmp_path / "a.onnx"), tmp_path / "a.mnn", runs=2).to_dict()
    pooled = graph([node("Mish", "x", "y")], [IMAGE], [("y", None)], opset=18)
    bad = convert_any(save(pooled, tmp_path / "b.onnx"), tmp_path / "b.mnn").to_dict()
    assert set(good) == set(bad) == keys
    json.dumps([good, bad], allow_nan=False)
    assert good["ops"] == {"Conv": 1, "Relu": 1}
    assert good["parity"]["runs"] == 2 * (5 + 1 + 3)  # two usual inputs, sparse, zeros, pixels
    assert good["parity"]["max_rel_error"] < 1e-5
    assert (bad["ok"], bad["output"], bad["size_bytes"], bad["parity"]) == (False, None, None, None)
    assert bad["unsupported"] == ["Mish"]
    assert "Mish" in bad["reason"]


def test_a_refusal_leaves_an_older_file_as_it_was(tmp_path):
    """The output is neither made nor touched, and nothing else is left in its folder."""
    dilated = graph(
        [node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[2, 2])], [IMAGE], [("y", None)]
    )
    wrong = graph(
        [node("GridSample", "x g", "y", padding_mode="reflection")],
        [IMAGE, ("g", [1, 5, 5, 2])],
        [("y", None)],
    )
    out = tmp_path / "out" / "m.mnn"
    out.parent.mkdir()
    out.write_bytes(b"older")
    for model in (dilated, wrong):
        assert not convert_any(save(model, tmp_path / "m.onnx"), out).ok
        assert out.read_bytes() == b"older"
        assert os.listdir(out.parent) == ["m.mnn"]  # noqa: PTH208 - hidden files count


def test_the_same_onnx_gives_the_same_bytes(tmp_path):
    """Two conversions differ in nothing."""
    path = save(_conv_relu(), tmp_path / "m.onnx")
    for out in ("a.mnn", "b.mnn"):
        assert convert_any(path, tmp_path / out, runs=1).ok
    assert (tmp_path / "a.mnn").read_bytes() == (tmp_path / "b.mnn").read_bytes()


def test_left_out_defaults_are_written_out_for_the_converter(tmp_path):
    """Pooling without strides crashes and LogSoftmax without axis goes wrong; written out they do not."""
    model = graph(
        [node("MaxPool", "x", "t", kernel_shape=[3, 3]), node("LogSoftmax", "t", "y")], [IMAGE], [("y", None)]
    )
    result = convert_any(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn", runs=3)
    assert result.ok, result.reason


def _external(location, *, offset=0, length=48):
    model = graph([node("Add", "x c", "y")], [("x", [12])], [("y", [12])], {"c": np.zeros(12, np.float32)})
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return model


HOSTILE = {
    "empty": b"",
    "text": b"this is no model",
    "random": np.random.default_rng(0).bytes(4096),
    "truncated": _conv_relu().SerializeToString()[:-90],
    "no graph": onnx.ModelProto(ir_version=8).SerializeToString(),
    "outside": _external("../secret.bin").SerializeToString(),
    "absolute": _external("/etc/passwd").SerializeToString(),
    "missing": _external("gone.bin").SerializeToString(),
    "too short": _external("weights.bin", offset=1 << 20).SerializeToString(),
    "terabytes": _external("weights.bin", length=1 << 40).SerializeToString(),
    "link": _external("link.bin").SerializeToString(),
    "long name": _external("w" * 5000).SerializeToString(),
    "long path": _external("w/" * 2500 + "w", length=48).SerializeToString(),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_that_are_no_usable_model_are_user_errors(kind, tmp_path):
    """One clear error that names the file; data outside the model's folder is not read."""
    folder = tmp_path / "models"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(48))
    (folder / "weights.bin").write_bytes(bytes(48))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "m.onnx").write_bytes(HOSTILE[kind])
    with pytest.raises(UserError, match=r"m\.onnx"):
        convert_any(folder / "m.onnx", tmp_path / "m.mnn")
    assert not (tmp_path / "m.mnn").exists()


def test_external_data_beside_the_model_is_read(tmp_path):
    """Weights in a file of their own arrive in the model."""
    (tmp_path / "weights.bin").write_bytes(np.arange(12, dtype=np.float32).tobytes())
    model = read_onnx(save(_external("weights.bin"), tmp_path / "m.onnx"))
    assert np.array_equal(onnx.numpy_helper.to_array(model.graph.initializer[0]), np.arange(12))


def test_invalid_graphs_are_refused(tmp_path):
    """A graph that onnx.checker rejects is refused with its words, not converted."""
    model = graph([node("Relu", "nowhere", "y")], [IMAGE], [("y", None)])
    result = convert_any(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn")
    assert not result.ok
    assert "nowhere" in result.reason


def test_options_that_contradict_each_other_are_user_errors(tmp_path):
    """int8 needs images and a model whose input is a picture."""
    path = save(_conv_relu(), tmp_path / "m.onnx")
    flat = save(graph([node("Relu", "x", "y")], [("x", [1, 5])], [("y", [1, 5])]), tmp_path / "flat.onnx")
    (tmp_path / "none").mkdir()
    _images(tmp_path / "some", 2, 16)
    for model, wrong in (
        (path, {"int8": True}),
        (path, {"int8": True, "calibration": tmp_path / "absent"}),
        (path, {"int8": True, "calibration": tmp_path / "none"}),
        (flat, {"int8": True, "calibration": tmp_path / "some"}),
        (path, {"int8": True, "calibration": tmp_path / "some", "options": ConvertOptions(fp16=True)}),
        (path, {"preprocess": Preprocess(size_px=16)}),
        (path, {"runs": 0}),
        (path, {"shapes": ["x=1,3,32,32"]}),
    ):
        with pytest.raises(UserError):
            convert_any(model, tmp_path / "m.mnn", **wrong)
    assert not (tmp_path / "m.mnn").exists()


def _images(folder, count, size_px):
    """Smooth pictures with noise, all different."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(count):
        corner = np.linspace(0, rng.uniform(60, 200), size_px)
        pixels = (
            corner[:, None, None]
            + corner[None, :, None] * rng.random(3)
            + rng.normal(0, 12, (size_px, size_px, 3))
        )
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{k:03}.png")
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A small convolutional classifier with batch norms, exported with them unfolded."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6()]
    layers += [nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)]
    model = nn.Sequential(*layers).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.2, 2)
            module.running_mean.normal_(0, 0.3)
    path = tmp_path_factory.mktemp("classifier") / "m.onnx"
    training = torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(
        model, torch.zeros(1, 3, 16, 16), str(path), dynamo=False, opset_version=17, training=training,
        do_constant_folding=False, input_names=["x"], output_names=["y"],
    )  # fmt: skip
    return path


def test_int8_layers_are_quantised_on_real_images_and_audited(classifier, tmp_path):
    """All convolutions but the first compute in int8, batch norms folded, close to the float model."""
    result = convert_any(
        classifier, tmp_path / "m.mnn", int8=True, calibration=_images(tmp_path / "i", 110, 16)
    )
    assert result.ok, result.reason
    assert result.reason == "2 layers compute in int8"
    assert result.parity is not None
    assert 1e-5 < result.parity.max_rel_error < 0.05
    assert result.parity.min_cosine > 0.99
    with Session(tmp_path / "m.mnn") as session:
        _, ops = session.trace({"x": np.ones((1, 3, 16, 16), np.float32)})
    assert sum(op.int8 and op.type.startswith("Conv") for op in ops) == 2


def test_onnx_runtime_never_runs_in_this_process(classifier, tmp_path, monkeypatch):
    """It may crash, hang or eat memory on what it does not understand: scales come from a child."""
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *_, **__: pytest.fail("run in this process"))
    result = convert_any(
        classifier, tmp_path / "m.mnn", int8=True, calibration=_images(tmp_path / "i", 9, 16)
    )
    assert result.ok, result.reason


def test_scales_are_those_of_all_images(classifier, tmp_path, monkeypatch):
    """However the images are divided between children, and a child past its limit is a refusal."""
    folded = fold(classifier, tmp_path / "f.onnx", timeout_s=60)
    layers = quantisable(folded)
    files = tuple(sorted(_images(tmp_path / "i", 7, 16).iterdir()))
    images = Calibration(files=files, input_name="x", preprocess=Preprocess(size_px=16))
    once = quantise(folded, layers, images, tmp_path, timeout_s=60).read_bytes()
    monkeypatch.setattr("tasks.mnn.onnx_ptq._IMAGES_A_CHILD", 3)
    assert quantise(folded, layers, images, tmp_path, timeout_s=60).read_bytes() == once
    with pytest.raises(EngineError, match="to calibrate it") as caught:
        quantise(folded, layers, images, tmp_path, timeout_s=0.01)
    assert "past its limit" in caught.value.engine_said
    with pytest.raises(EngineError, match="cannot load the model"):
        fold(save(onnx.ModelProto(), tmp_path / "none.onnx"), tmp_path / "none", timeout_s=60)


def test_few_calibration_images_are_said(classifier, tmp_path):
    """Too few images are a warning in the result with the number that is asked for."""
    result = convert_any(
        classifier, tmp_path / "m.mnn", int8=True, calibration=_images(tmp_path / "i", 9, 20)
    )
    assert result.ok, result.reason
    assert "calibrated on 9 images" in result.reason
    assert "100" in result.reason


def test_bad_calibration_images_are_said(classifier, tmp_path, capsys):
    """Noise, and images that a dataset trains on: converted, with the warning in result and log; a dataset
    that cannot be read is named and stops nothing.
    """
    prepared = write_digits(tmp_path / "prepared", {"train": 6, "calibration": 3, "test": 3}, size_px=16)
    folder, rng = _images(tmp_path / "i", 12, 16), np.random.default_rng(0)
    for index, image in enumerate(Dataset.open(prepared).split("train").images(range(6))):
        Image.fromarray(image).save(folder / f"digit{index}.png")
    for index in range(4):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"noise{index}.png")
    datasets = {"digits": prepared, "broken": tmp_path}
    out = tmp_path / "m.mnn"
    result = convert_any(classifier, out, int8=True, calibration=folder, datasets=datasets)
    assert result.ok, result.reason
    said = capsys.readouterr().err
    for expected in (
        "4 of 22 calibration images look like noise",
        "of 22 calibration images 6 in the training set of the dataset of digits",
        "calibration images not compared with the dataset of broken",
    ):
        assert expected in result.reason
        assert expected in said


def test_a_calibration_image_that_does_not_open_is_named(classifier, tmp_path):
    """A damaged file is an error with its name, not a smaller calibration set."""
    folder = _images(tmp_path / "i", 3, 16)
    (folder / "001.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(UserError, match=r"001\.png"):
        convert_any(classifier, tmp_path / "m.mnn", int8=True, calibration=folder)


def test_a_model_without_convolutions_cannot_be_int8(tmp_path):
    """Nothing to quantise is a refusal, not a float model that calls itself int8."""
    model = graph([node("Relu", "x", "y")], [IMAGE], [("y", IMAGE[1])])
    calibration = _images(tmp_path / "i", 3, 16)
    result = convert_any(
        save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn", int8=True, calibration=calibration
    )
    assert not result.ok
    assert "no convolution" in result.reason


def test_unknown_operators_are_named_before_the_converter_runs(tmp_path, monkeypatch):
    """All of them, with their nodes; the converter would write no file for them, and say success."""
    nodes = [node("Mish", "x", "t"), node("Relu", "t", "u"), node("IsNaN", "u", "y")]
    model = graph(nodes, [IMAGE], [("y", IMAGE[1], TensorProto.BOOL)], opset=18)
    monkeypatch.setattr("tasks.mnn.onnx_job.convert", lambda *_: pytest.fail("the converter was started"))
    result = convert_any(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn")
    assert result.unsupported == ["IsNaN", "Mish"]
    assert "Mish 'Mish_t': the converter has no such operator; IsNaN 'IsNaN_y'" in result.reason


def test_foreign_operators_are_counted_with_their_domain(tmp_path):
    """The histogram keeps domain and name apart."""
    model = graph([node("Relu", "x", "t"), node("Relu", "t", "y", domain="my.ops")], [IMAGE], [("y", None)])
    model.opset_import.append(helper.make_opsetid("my.ops", 1))
    result = convert_any(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn")
    assert result.ops == {"Relu": 1, "my.ops::Relu": 1}
    assert result.unsupported == ["my.ops::Relu"]


@pytest.mark.parametrize("kind", ["itself", "a link", "a folder", "a pipe", "under a file", "no name"])
def test_outputs_that_would_do_harm_are_refused(kind, tmp_path):
    """The input stays, a link keeps pointing where it did, and a path that cannot be a file is named."""
    model = save(_conv_relu(), tmp_path / "m.onnx")
    before = model.read_bytes()
    link = tmp_path / "link.mnn"
    link.symlink_to(tmp_path / "target.mnn")
    pipe = tmp_path / "pipe.mnn"
    os.mkfifo(pipe)
    out = {
        "itself": model,
        "a link": link,
        "a folder": tmp_path,
        "a pipe": pipe,
        "under a file": model / "m.mnn",
        "no name": Path(),
    }[kind]
    with pytest.raises(UserError):
        convert_any(model, out, runs=1)
    assert model.read_bytes() == before
    assert link.is_symlink()
    assert pipe.is_fifo()


@pytest.mark.parametrize("kernel", [5, 7])
def test_wide_convolutions_may_err_as_the_engine_does(kernel, tmp_path):
    """A plain convolution with a wide kernel is right within 6e-4, not within 1e-4, and is not refused."""
    inputs, weights_ = [("x", [1, 3, 64, 64])], {"w": weights(16, 3, kernel, kernel), "b": weights(16)}
    conv = node("Conv", "x w b", "y", pads=[kernel // 2] * 4)
    result = convert_any(
        save(graph([conv], inputs, [("y", None)], weights_), tmp_path / "m.onnx"), tmp_path / "m"
    )
    assert result.ok, result.reason
    assert result.parity.max_rel_error < 6e-4


def test_the_longest_file_name_there_is_can_be_written(tmp_path):
    """250 characters and more are a legal name."""
    out = tmp_path / ("m" * 246 + ".mnn")
    assert convert_any(save(_conv_relu(), tmp_path / "m.onnx"), out, runs=1).ok
    assert out.is_file()


def test_inputs_that_no_memory_holds_are_a_user_error(tmp_path):
    """A shape of terabytes, asked for or declared, is refused before anything is made of that size."""
    dynamic = save(
        graph([node("Relu", "x", "y")], [("x", ["n", 3, "h", "w"])], [("y", None)]), tmp_path / "dynamic.onnx"
    )
    declared = save(
        graph([node("Relu", "x", "y")], [("x", [9, 3, 99999, 99999])], [("y", None)]),
        tmp_path / "declared.onnx",
    )
    for model, shapes in ((dynamic, ["x=1,3,99999,99999"]), (declared, [])):
        with pytest.raises(UserError, match=r"inputs of [\d,]+ MB at x=\d,3,99999,99999"):
            convert_any(model, tmp_path / "m.mnn", shapes=shapes)
    assert not (tmp_path / "m.mnn").exists()
