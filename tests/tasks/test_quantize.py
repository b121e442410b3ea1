"""The stage quantize on digits: what it learns is what the engine computes, and its report is true."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nn.digit_set import write_digits
from torch import nn

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset
from tasks.export import ExportParams, Variants, export
from tasks.mnn.converter import convert, dump
from tasks.mnn.request import ConvertOptions
from tasks.nn.arch import Architecture
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.evaluate import evaluate
from tasks.nn.pruning import PruneOptions, prune_to
from tasks.nn.quantized import QuantizedModel
from tasks.nn.reference import reference_model
from tasks.quantize import CHECKPOINT, LAYERS, QuantizeParams, quantize
from tasks.variants import Variant

PREPROCESS = Preprocess(size_px=32)
PARENT = Path("models/train/checkpoint.pt")
SPLITS = {"train": 640, "val": 100, "calibration": 100, "test": 400}
QAT = QuantizeParams(epochs=1, parent="trained", batch_size=32)
PTQ = QuantizeParams(epochs=0, parent="trained")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits") / "prepared", SPLITS)


def make_workspace(root: Path, data: Path, checkpoint: Checkpoint) -> None:
    """A workspace with prepared data and a trained model."""
    (root / "data").mkdir(parents=True, exist_ok=True)
    (root / "data/prepared").symlink_to(data)
    checkpoint.save(root / PARENT)


@pytest.fixture
def enter(data, tmp_path, monkeypatch):
    """Make a workspace with a trained model and work in it."""

    def make_and_enter(checkpoint: Checkpoint, data: Path = data) -> None:
        make_workspace(tmp_path, data, checkpoint)
        monkeypatch.chdir(tmp_path)

    return make_and_enter


def train_briefly(model: nn.Module, data: Path, epochs: int) -> None:
    """A few dozen steps: activations of unit size and logits that mean something."""
    split = Dataset.open(data).split("train")
    x = torch.from_numpy(PREPROCESS.batch(list(split.images(range(len(split))))))
    y = torch.tensor(split.labels)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()


def trained(name: str, data: Path, *, epochs: int, pruned: float = 0.0) -> Checkpoint:
    """A briefly trained classifier, pruned and fine-tuned if asked for."""
    torch.manual_seed(0)
    architecture = Architecture(name=name, num_classes=10)
    model = architecture.build()
    train_briefly(model, data, epochs)
    if pruned:
        model = prune_to(model, torch.randn(2, 3, 32, 32), pruned, model, PruneOptions())
        train_briefly(model, data, 1)
    return Checkpoint(
        architecture=architecture.with_widths_of(model),
        state=model.state_dict(),
        preprocess=PREPROCESS,
        labels=Dataset.open(data).label_names,
        pruned_percent=round(100 * pruned),
    )


@pytest.fixture(scope="module")
def parent(data) -> Checkpoint:
    return trained("mobilenet_v3_small", data, epochs=4)


def engine_logits(folder: Path, images_NCHW: np.ndarray, int8_tensors: list[str]) -> np.ndarray:
    """Logits of an exported variant in the engine, after checking that every listed layer ran in int8."""
    card = json.loads((folder / "card.json").read_text())
    options = ConvertOptions(compression=folder / "compression.json", weight_bits=card["weight_bits"])
    convert(folder / "model.onnx", folder / "model.mnn", options)
    names = {tensor: op.name for op in dump(folder / "model.mnn").ops for tensor in op.outputs}
    with Session(folder / "model.mnn") as session:
        _, ops = session.trace({"input": images_NCHW[:1]})
        ran = {op.name for op in ops if op.int8}
        assert not [tensor for tensor in int8_tensors if names[tensor] not in ran]
        return np.concatenate([session.run({"input": image[None]})["logits"] for image in images_NCHW])


@pytest.mark.parametrize(
    ("name", "pruned"),
    [("mobilenet_v3_small", 0.0), ("mobilenet_v3_small", 0.3), ("mobilenet_v2", 0.0), ("resnet18", 0.25)],
)
def test_the_engine_predicts_what_qat_predicted(name, pruned, data, parent, enter):
    """QAT, export, conversion: every listed layer is int8, and 99 % of the predictions are the same."""
    plain = name == "mobilenet_v3_small" and not pruned
    enter(parent if plain else trained(name, data, epochs=2, pruned=pruned))
    report = quantize(QAT)
    variants = Variants.model_construct(trained=("i8",), pruned=())  # a gate would want fp32, too
    export(ExportParams.model_construct(variants=variants))
    (folder,) = Path("models/export").iterdir()
    test = Dataset.open(data).split("test")
    images = PREPROCESS.batch(list(test.images(range(len(test)))))
    card = json.loads((folder / "card.json").read_text())
    assert len(card["int8_layers"]) == report["int8_layers_count"] > 15
    logits = engine_logits(folder, images, card["int8_layers"])
    expected = evaluate(reference_model(Variant.parse(folder.name)), test, PREPROCESS)
    assert (logits.argmax(1) == expected.predictions).mean() >= 0.99
    assert (logits * expected.logits).sum() / np.linalg.norm(logits) / np.linalg.norm(expected.logits) > 0.999
    assert expected.top1 == pytest.approx(report["i8_test_top1"])


@pytest.fixture(scope="module")
def ptq(data, parent, tmp_path_factory):
    """A workspace after PTQ, and its report."""
    root = tmp_path_factory.mktemp("ptq")
    make_workspace(root, data, parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return root, quantize(PTQ)


def test_ptq_is_the_same_graph_without_training(ptq):
    """0 epochs leave the calibrated model: what is reported as ptq is what is saved."""
    root, report = ptq
    assert report["i8_test_top1"] == pytest.approx(report["ptq_test_top1"], abs=0.01)
    assert report["fp32_test_top1"] > 0.5
    assert report["calibration_images_count"] == 100
    assert report["calibration_is_disjoint"] == 1
    assert QuantizedModel.from_checkpoint(Checkpoint.load(root / CHECKPOINT)).plan.layers


def test_the_same_inputs_give_the_same_bytes(parent, ptq, enter):
    """Checkpoint and layer report of a second run are those of the first."""
    enter(parent)
    quantize(PTQ)
    assert CHECKPOINT.read_bytes() == (ptq[0] / CHECKPOINT).read_bytes()
    assert LAYERS.read_bytes() == (ptq[0] / LAYERS).read_bytes()


def test_the_layer_report_ranks_the_worst_first(ptq):
    """Each int8 layer has its error, worst first; each float layer has its reason."""
    root, report = ptq
    with (root / LAYERS).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    int8 = [row for row in rows if row["precision"] == "int8"]
    snr = [float(row["snr_db"]) for row in int8]
    assert len(int8) == report["int8_layers_count"] == 51
    assert snr == sorted(snr)
    assert report["worst_layer_snr_db"] == pytest.approx(snr[0], rel=1e-5)
    assert all(0.5 < float(row["cosine"]) <= 1 for row in int8)
    # Error adds up along the graph: almost every layer is worse in place than alone.
    assert np.mean([float(row["snr_in_place_db"]) < float(row["snr_db"]) for row in int8]) > 0.9
    # An activation that works in place, as Hardswish does, changes nothing of what is compared.
    assert min(float(row["snr_in_place_db"]) for row in int8) > 5
    reasons = {row["layer"]: row["reason"] for row in rows if row["precision"] == "float"}
    assert reasons["features.0.0"] == "skipped by rule 'first'"
    assert set(reasons) == {"features.0.0", "classifier.0", "classifier.3"}


def test_a_saved_model_comes_back_whole(data, ptq):
    """Built from the checkpoint alone, the graph gives the logits that were reported."""
    root, report = ptq
    model = QuantizedModel.from_checkpoint(Checkpoint.load(root / CHECKPOINT))
    test = Dataset.open(data).split("test")
    assert evaluate(model.graph, test, PREPROCESS).top1 == pytest.approx(report["i8_test_top1"])


@pytest.mark.parametrize("name", ["train", "val"])
def test_calibration_on_other_splits_is_said(name, parent, enter, capsys):
    """Images the model was fitted to are no calibration set: allowed, but said and marked in the report."""
    enter(parent)
    report = quantize(PTQ.model_copy(update={"calibration_split": name}))
    assert f"calibrating on `{name}`" in capsys.readouterr().err
    assert report["calibration_is_disjoint"] == 0


@pytest.mark.parametrize("split", ["test", "random"])
def test_calibration_on_test_or_random_data_is_refused(split):
    """Neither the test set nor noise can be asked for."""
    with pytest.raises(ValueError, match="calibration_split"):
        QuantizeParams(calibration_split=split)


def test_no_calibration_images_is_an_error(parent, tmp_path, enter):
    """An empty calibration split is never padded from another one."""
    enter(parent, write_digits(tmp_path / "digits", {"train": 10, "val": 5, "test": 5}))
    with pytest.raises(UserError, match="no images in the split `calibration`"):
        quantize(PTQ)


def test_a_parent_of_other_classes_is_refused(parent, enter):
    """A model that knows other classes than the dataset is not quantised on it."""
    enter(replace(parent, labels=tuple("abcdefghij")))
    with pytest.raises(UserError, match="classes"):
        quantize(PTQ)
