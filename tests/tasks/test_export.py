"""The stage export: cards that tell the truth, one name a variant, the same bytes twice."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.export import OUT, ExportParams, Variants, export
from tasks.mnn.int8_record import int8_layers
from tasks.nn.arch import Architecture
from tasks.nn.calibrate import calibrate
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.fakequant import weight_only_int8
from tasks.nn.quantized import QuantizedModel
from tasks.nn.reference import reference_model
from tasks.variants import Variant

PREPROCESS = Preprocess(size_px=32)
ALL = ExportParams(variants=Variants(trained=("fp32",), pruned=("fp32", "fp16", "w8", "i8")))
I8 = "mbv3s-p30-i8-r32"


def make_workspace(root: Path) -> Path:
    """Untrained checkpoints: the trained one, the pruned one (as it were), and the quantised one."""
    torch.manual_seed(0)
    architecture = Architecture(name="mobilenet_v3_small", num_classes=4)
    model = architecture.build().eval()
    trained = Checkpoint(
        architecture=architecture,
        state=model.state_dict(),
        preprocess=PREPROCESS,
        labels=("a", "b", "c", "d"),
    )
    pruned = replace(trained, pruned_percent=30)
    quantised = QuantizedModel(model, ("first", "last"))
    calibrate(quantised.graph, lambda: iter([torch.randn(4, 3, 32, 32)]), "max_abs")
    quantised.freeze()
    trained.save(root / "models/train/checkpoint.pt")
    pruned.save(root / "models/prune/checkpoint.pt")
    quantised.to_checkpoint(pruned).save(root / "models/quantize/checkpoint.pt")
    return root


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A workspace with all variants exported, and the report."""
    root = make_workspace(tmp_path_factory.mktemp("export"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return root, export(ALL)


def card_of(root: Path, name: str) -> dict:
    return json.loads((root / OUT / name / "card.json").read_text())


def test_every_variant_has_its_files(exported):
    """One folder a variant, named decodably; only i8 has compression parameters."""
    root, report = exported
    names = {path.name for path in (root / OUT).iterdir()}
    assert names == {"mbv3s-p0-fp32-r32", *(f"mbv3s-p30-{p}-r32" for p in ("fp32", "fp16", "w8", "i8"))}
    with_scales = {path.parent.name for path in (root / OUT).glob("*/compression.json")}
    assert with_scales == {I8}
    assert report[f"{I8}/int8_layers_count"] == 51
    assert report[f"{I8}/size_bytes"] == (root / OUT / I8 / "model.onnx").stat().st_size


def test_a_card_says_what_the_model_is(exported):
    """Names, shapes, labels, hashes and what must be int8 are those of the files beside the card."""
    root, _ = exported
    card = card_of(root, I8)
    onnx_sha256 = hashlib.sha256((root / OUT / I8 / "model.onnx").read_bytes()).hexdigest()
    assert card["source_sha256"] == onnx_sha256
    assert card["variant"] == I8
    assert card["labels"] == ["a", "b", "c", "d"]
    assert Preprocess.from_dict(card["preprocess"]).digest() == card["preprocess_sha256"]
    assert Architecture.from_dict(card["architecture"]).num_classes == 4
    assert card["inputs"] == [
        {"name": "input", "shape": [1, 3, 32, 32], "dtype": "float32", "layout": "NCHW"}
    ]
    assert card["outputs"] == [{"name": "logits", "shape": [1, 4], "dtype": "float32", "layout": "NC"}]
    listed = [layer.output for layer in int8_layers(root / OUT / I8 / "compression.json")]
    assert card["int8_layers"] == listed
    assert len(set(listed)) == 51
    weight_bits = {
        name: card_of(root, f"mbv3s-p30-{name}-r32")["weight_bits"] for name in ("fp32", "fp16", "w8", "i8")
    }
    assert weight_bits == {"fp32": None, "fp16": None, "w8": 8, "i8": 8}


def test_scales_are_the_checkpoints(exported):
    """What the converter is told is what was learned."""
    root, _ = exported
    model = QuantizedModel.from_checkpoint(Checkpoint.load(root / "models/quantize/checkpoint.pt"))
    told = int8_layers(root / OUT / I8 / "compression.json")
    for learned, layer in zip(model.scales(), told, strict=True):
        assert (layer.input_scale, layer.output_scale) == (learned.input_step, learned.output_step)
        assert layer.weight_scales == learned.weight_steps


def test_two_exports_are_the_same_bytes(exported, tmp_path, monkeypatch):
    """A second export elsewhere writes the same files."""
    root, _ = exported
    monkeypatch.chdir(make_workspace(tmp_path))
    export(ALL)
    files = sorted(path.relative_to(root) for path in (root / OUT).rglob("*") if path.is_file())
    assert [path for path in files if path.read_bytes() != (root / path).read_bytes()] == []


def test_variants_of_an_earlier_export_are_gone(tmp_path, monkeypatch):
    """The folder holds what was asked for now, and nothing half-written."""
    monkeypatch.chdir(make_workspace(tmp_path))
    (OUT / "mbv3s-p0-i8-r32").mkdir(parents=True)
    OUT.with_name("export.part").mkdir()
    export(ExportParams(variants=Variants(trained=("fp32",), pruned=())))
    assert [path.name for path in Path("models").glob("export*")] == ["export"]
    assert [path.name for path in OUT.iterdir()] == ["mbv3s-p0-fp32-r32"]


def test_a_variant_asked_for_twice_is_refused(tmp_path, monkeypatch):
    """A model pruned by nothing has the trained model's name: neither overwrites the other."""
    monkeypatch.chdir(make_workspace(tmp_path))
    Checkpoint.load(Path("models/train/checkpoint.pt")).save(Path("models/prune/checkpoint.pt"))
    with pytest.raises(UserError, match="mbv3s-p0-fp32-r32 twice"):
        export(ExportParams(variants=Variants(trained=("fp32",), pruned=("fp32",))))


def test_int8_of_another_parent_is_refused(tmp_path, monkeypatch):
    """The quantised checkpoint comes from the pruned model, so it is not the trained model's int8 form."""
    monkeypatch.chdir(make_workspace(tmp_path))
    with pytest.raises(UserError, match=r"quantize\.parent"):
        export(ExportParams(variants=Variants(trained=("fp32", "i8"), pruned=())))


def test_nothing_to_export_and_missing_checkpoints_are_errors(tmp_path, monkeypatch):
    """Both say what to do next."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="empty"):
        export(ExportParams(variants=Variants(trained=(), pruned=())))
    with pytest.raises(UserError, match="checkpoint"):
        export(ALL)
    with pytest.raises(ValueError, match="twice"):
        Variants(trained=("fp32", "fp32"))


@pytest.mark.parametrize(
    ("trained", "pruned"), [(("i8",), ()), (("fp32",), ("i8",)), ((), ("fp32",)), ((), ("fp16", "i8"))]
)
def test_a_variant_without_the_one_it_is_held_against_is_refused(trained, pruned):
    """The gate would refuse it for want of a measurement, after hours."""
    with pytest.raises(ValueError, match="held against"):
        Variants(trained=trained, pruned=pruned)


def test_a_failed_export_leaves_the_last_one(exported, tmp_path, monkeypatch):
    """A run that fails half-way does not touch what is there."""
    monkeypatch.chdir(make_workspace(tmp_path))
    export(ExportParams(variants=Variants(trained=("fp32",), pruned=())))
    Path("models/quantize/checkpoint.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="checkpoint"):
        export(ALL)
    assert [path.name for path in OUT.iterdir()] == ["mbv3s-p0-fp32-r32"]


def test_references_are_the_exported_models(exported):
    """w8's reference has rounded weights, i8's is the fake-quant graph, and a wrong name is refused."""
    root, _ = exported
    float_model = reference_model(Variant.parse("mbv3s-p30-fp32-r32"), root)
    rounded = reference_model(Variant.parse("mbv3s-p30-w8-r32"), root)
    expected = weight_only_int8(float_model.classifier[3].weight)
    assert torch.equal(rounded.get_submodule("classifier.3").weight, expected)
    int8 = reference_model(Variant.parse(I8), root)
    assert not int8.training
    assert "quantizers" in dict(int8.named_children())
    with pytest.raises(UserError, match="mbv3s-p30-i8-r32"):
        reference_model(Variant.parse("mbv3s-p50-i8-r32"), root)
