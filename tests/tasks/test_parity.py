"""The stage parity on a small trained model in four precisions, and on conversions made wrong on purpose."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest
import torch
from nn.digit_set import write_digits
from onnx import numpy_helper
from torch import nn

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from tasks.convert import ConvertParams, convert_all
from tasks.data.dataset import Dataset
from tasks.export import ExportParams, Variants, export
from tasks.mnn.compare import Comparison, compare
from tasks.mnn.converter import convert
from tasks.nn.arch import Architecture
from tasks.nn.checkpoint import Checkpoint
from tasks.parity import ParityParams, Tolerance, failures, parity, write_predictions
from tasks.quantize import QuantizeParams, quantize

PREPROCESS = Preprocess(size_px=32)
FP32, FP16, W8, I8 = (f"mbv3s-p30-{precision}-r32" for precision in ("fp32", "fp16", "w8", "i8"))
PARAMS = ParityParams(images=16)


def trained_checkpoint(data: Path) -> Checkpoint:
    """MobileNetV3-Small after a few dozen steps on digits: activations of unit size, meaningful logits."""
    torch.manual_seed(0)
    dataset = Dataset.open(data)
    train = dataset.split("train")
    architecture = Architecture(name="mobilenet_v3_small", num_classes=10)
    model = architecture.build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    x = torch.from_numpy(PREPROCESS.batch(list(train.images(range(len(train))))))
    y = torch.tensor(train.labels)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(6):
        for rows in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return Checkpoint(
        architecture=architecture,
        state=model.state_dict(),
        preprocess=PREPROCESS,
        labels=dataset.label_names,
        pruned_percent=30,
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A workspace up to the stage convert; the i8 model is calibrated only."""
    root = tmp_path_factory.mktemp("workspace")
    write_digits(
        root / "data/prepared", {"train": 320, "val": 40, "calibration": 100, "test": 120}, size_px=32
    )
    trained_checkpoint(root / "data/prepared").save(root / "models/prune/checkpoint.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        quantize(QuantizeParams(epochs=0))
        # Without the trained model the gate would refuse these; parity needs none.
        variants = Variants.model_construct(trained=(), pruned=("fp32", "fp16", "w8", "i8"))
        export(ExportParams.model_construct(variants=variants))
        convert_all(ConvertParams())
    return root


@pytest.fixture(scope="module")
def result(workspace):
    """(report, predictions) of the workspace as it was built."""
    return parity(PARAMS, workspace)


@pytest.fixture
def copy(workspace, tmp_path):
    """A copy of the workspace with the fp32 variant only, to be spoilt."""
    root = tmp_path / "copy"
    shutil.copytree(workspace, root)
    for name in (FP16, W8, I8):
        shutil.rmtree(root / "models/mnn" / name)
    return root


def edit_card(root, variant=FP32, **changes):
    path = root / "models/mnn" / variant / "card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reconvert(root, edit):
    """Replace the fp32 model by the conversion of its ONNX after `edit(graph)`."""
    model = onnx.load(str(root / "models/export" / FP32 / "model.onnx"))
    edit(model.graph)
    onnx.save(model, str(root / "wrong.onnx"))
    made = convert(root / "wrong.onnx", root / "models/mnn" / FP32 / "model.mnn")
    edit_card(root, mnn_sha256=made.sha256)


@pytest.mark.parametrize("variant", [FP32, FP16, W8, I8])
def test_right_conversions_pass(result, variant):
    """Every precision agrees with its own reference, within its own tolerance."""
    report, _ = result
    assert report[f"{variant}/reason"] == ""
    assert report[f"{variant}/parity_ok"] == 1
    assert report[f"{variant}/first_diverging_layer"] == ""
    assert 0 < report[f"{variant}/max_rel_error"] <= report[f"{variant}/tolerance_rel"]
    assert report[f"{variant}/n"] == 120
    assert report[f"{variant}/elementwise_n"] == 16


def test_float_parity_is_at_rounding_level(result):
    """fp32 in torch, ONNX Runtime and MNN agree to far better than 1e-4 of the range."""
    report, _ = result
    assert report[f"{FP32}/max_rel_error"] < 1e-5
    assert report[f"{FP32}/onnx_max_rel_error"] < 1e-5
    assert report[f"{FP32}/agreement"] == 1
    assert report[f"{FP32}/top1"] == report[f"{FP32}/top1_torch"] > 0.3  # chance is 0.1


def test_int8_ran_in_int8(result):
    """Only the i8 variant executes int8 operators, and dozens of them."""
    report, _ = result
    assert report[f"{I8}/int8_ops_count"] > 40
    assert report[f"{FP32}/int8_ops_count"] == 0


def test_report_is_flat_numbers_and_words(result):
    """Nothing nested, nothing that strict JSON cannot hold."""
    report, _ = result
    assert {type(value) for value in report.values()} <= {int, float, str}
    json.dumps(report, allow_nan=False)


def test_predictions_are_paired_by_image(result, workspace):
    """One row a test image, in the split's order; each column reproduces the accuracy in the report."""
    report, predictions = result
    test = Dataset.open(workspace / "data/prepared").split("test")
    assert tuple(predictions["sha256"]) == test.sha256
    for variant in (FP32, I8):
        right = (predictions[variant] == predictions["label"]).mean()
        assert right == pytest.approx(report[f"{variant}/top1"])


def test_the_same_build_gives_the_same_bytes(copy, tmp_path):
    """Report and predictions do not change from run to run."""
    runs = [parity(PARAMS, copy) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    for name, (_, predictions) in zip("ab", runs, strict=True):
        write_predictions(predictions, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert list(pd.read_parquet(tmp_path / "a").columns) == ["sha256", "label", FP32]


def test_a_wrong_layer_is_refused_and_named(copy):
    """One altered weight channel in the middle: parity fails with numbers and the layer."""

    def scale_one_channel(graph):
        tensor = next(t for t in graph.initializer if t.name == "features.5.block.0.0.weight")
        weight = numpy_helper.to_array(tensor).copy()
        weight[:4] *= 1.5
        tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))

    reconvert(copy, scale_one_channel)
    graph = onnx.load(str(copy / "models/export" / FP32 / "model.onnx")).graph
    layer = next(node.name for node in graph.node if "features.5.block.0.0.weight" in node.input)
    report, _ = parity(PARAMS, copy)
    assert report[f"{FP32}/parity_ok"] == 0
    assert "of the range, allowed 0.0001" in report[f"{FP32}/reason"]
    assert report[f"{FP32}/first_diverging_layer"].startswith(f"first diverging layer {layer} (Conv)")


def test_a_wrong_int8_layer_is_named_against_the_fake_quant_model(workspace, tmp_path):
    """The float ONNX is no reference for int8: the layer is found by fake-quant tensors."""
    root = tmp_path / "copy"
    shutil.copytree(workspace, root)
    for name in (FP32, FP16, W8):
        shutil.rmtree(root / "models/mnn" / name)
    path = root / "models/quantize/checkpoint.pt"
    checkpoint = Checkpoint.load(path)
    state = dict(checkpoint.state)
    key = next(k for k in state if k.startswith("features.9.block.0.0") and k.endswith("bias"))
    state[key] = state[key] + state[key].abs().max() * 30
    replace(checkpoint, state=state).save(path)
    report, _ = parity(PARAMS, root)
    assert report[f"{I8}/parity_ok"] == 0
    graph = onnx.load(str(root / "models/export" / I8 / "model.onnx")).graph
    layer = next(node.name for node in graph.node if "features.9.block.0.0.weight" in node.input)
    assert f"first diverging layer {layer} (Conv)" in report[f"{I8}/first_diverging_layer"]


def test_int8_that_stayed_float_is_refused(workspace, tmp_path):
    """A float model under the name of the int8 one predicts well and is still no int8."""
    root = tmp_path / "copy"
    shutil.copytree(workspace, root)
    for name in (FP32, FP16, W8):
        shutil.rmtree(root / "models/mnn" / name)
    made = convert(root / "models/export" / I8 / "model.onnx", root / "models/mnn" / I8 / "model.mnn")
    edit_card(root, I8, mnn_sha256=made.sha256)
    report, _ = parity(PARAMS, root)
    assert "no operator ran in int8" in report[f"{I8}/reason"]
    assert report[f"{I8}/parity_ok"] == 0


def test_an_export_that_left_torch_is_refused(copy):
    """Engine and ONNX agree with each other but not with the checkpoint."""
    path = copy / "models/prune/checkpoint.pt"
    checkpoint = Checkpoint.load(path)
    state = dict(checkpoint.state)
    state["classifier.3.bias"] = state["classifier.3.bias"] + torch.arange(10.0)
    replace(checkpoint, state=state).save(path)
    report, _ = parity(PARAMS, copy)
    assert "the exported ONNX is" in report[f"{FP32}/reason"]
    assert report[f"{FP32}/first_diverging_layer"].startswith("none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["cat"] * 10}, "labels.*checkpoint"),
        ({"preprocess": replace(PREPROCESS, color_order="BGR").to_dict()}, "preprocess.*digest"),
        (
            {
                "preprocess": replace(PREPROCESS, color_order="BGR").to_dict(),
                "preprocess_sha256": replace(PREPROCESS, color_order="BGR").digest(),
            },
            "preprocess.*'BGR'.*checkpoint.*'RGB'",
        ),
        ({"mnn_sha256": "0" * 64}, "mnn_sha256"),
        ({"inputs": [{"name": "image", "shape": [1, 3, 32, 32], "dtype": "float32"}]}, "inputs.*image"),
        ({"outputs": [{"name": "logits", "shape": [1, 11], "dtype": "float32"}]}, "outputs.*11"),
    ],
)
def test_a_card_that_lies_is_a_user_error(copy, changes, message):
    """Labels, preprocess, file hash, input and output are held against what they describe."""
    edit_card(copy, **changes)
    with pytest.raises(UserError, match=f"(?s){FP32}: the card's {message}"):
        parity(PARAMS, copy)


def test_an_unreadable_model_is_an_engine_error(copy):
    """Damage is no verdict: the stage fails."""
    path = copy / "models/mnn" / FP32 / "model.mnn"
    path.write_bytes(path.read_bytes()[:1000])
    edit_card(copy, mnn_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(EngineError, match="does not open"):
        parity(PARAMS, copy)


def test_nothing_to_compare_is_a_user_error(copy):
    """No converted model: the next step is named."""
    shutil.rmtree(copy / "models/mnn")
    with pytest.raises(UserError, match=r"(?s)0 converted models and 120 test images.*dvc repro convert"):
        parity(PARAMS, copy)


TOLERANCE = Tolerance(max_rel_error=0.1, min_cosine=0.99, min_agreement=0.99)
FINE = Comparison(max_abs_error=0.0, max_rel_error=0.0, cosine=1.0, finite_count=10)


@pytest.mark.parametrize(("n", "allowed"), [(10, 1), (100, 1), (101, 2), (1000, 10)])
def test_allowed_disagreements(n, allowed):
    """One image always, else one per cent, rounded up."""
    for disagreements, refused in ((allowed, False), (allowed + 1, True)):
        reasons = failures(TOLERANCE, engine=FINE, onnx=None, disagreements=disagreements, n=n)
        assert bool(reasons) is refused


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (replace(FINE, max_rel_error=0.11), "error 0.11 of the range, allowed 0.1"),
        (replace(FINE, cosine=0.98), "cosine 0.98"),
        (compare(np.float32([np.nan, 1]), np.float32([0, 1])), "NaN or infinity returned"),
        (compare(np.float32([np.nan]), np.float32([np.nan])), "no finite value"),
    ],
)
def test_reasons(engine, reason):
    """Each limit has a phrase with what was measured; NaN on both sides proves nothing."""
    reasons = failures(TOLERANCE, engine=engine, onnx=None, disagreements=0, n=10)
    assert reason in "; ".join(reasons)
