"""The stage convert: four precisions, completed cards, one report, and nothing from a faulty export."""

import csv
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conversion_models import two_conv_layers, two_convs, write_compression

from fleet.device.errors import EdgeloopError, EngineError, UserError
from tasks.convert import ConvertParams, _op_rows, convert_all, main
from tasks.mnn.converter import dump

WIDTH = 32
PRECISIONS = ("fp32", "fp16", "w8", "i8")


def _export(models: Path, precision: str) -> Path:
    """What the stage export leaves for one variant."""
    folder = models / f"net-p30-{precision}-r8"
    onnx = two_convs(folder / "model.onnx", width=WIDTH)
    layers = two_conv_layers(WIDTH) if precision == "i8" else []
    if layers:
        write_compression(folder / "compression.json", layers)
    card = {
        "variant": folder.name,
        "biz_code": "shop",
        "labels": ["a", "b"],
        "inputs": [{"name": "input", "shape": [1, 3, 8, 8], "dtype": "float32", "layout": "NCHW"}],
        "outputs": [{"name": "logits", "shape": [1, 5, 8, 8], "dtype": "float32", "layout": "NC"}],
        "source_sha256": hashlib.sha256(onnx.read_bytes()).hexdigest(),
        "int8_layers": [record["output"][0]["name"] for record in layers],
        "weight_bits": 8 if precision in {"w8", "i8"} else None,
    }
    (folder / "card.json").write_text(json.dumps(card), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A workspace with the four precisions of one network, converted once, and the report."""
    folder = tmp_path_factory.mktemp("workspace")
    for precision in PRECISIONS:
        _export(folder / "models" / "export", precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, convert_all(ConvertParams())


def _card(workspace: Path, precision: str) -> dict[str, Any]:
    text = (workspace / "models/mnn" / f"net-p30-{precision}-r8" / "card.json").read_text(encoding="utf-8")
    card: dict[str, Any] = json.loads(text)
    return card


def test_each_precision_is_what_its_name_says(converted: tuple[Path, dict[str, float]]) -> None:
    """Weights, int8 layers and size follow the variant; the report is flat and agrees with the cards."""
    workspace, report = converted
    stored = {
        precision: [
            report[f"net-p30-{precision}-r8/layers_{kind}_count"] for kind in ("float32", "float16", "int8")
        ]
        for precision in PRECISIONS
    }
    assert stored == {"fp32": [3, 0, 0], "fp16": [0, 3, 0], "w8": [0, 0, 3], "i8": [0, 0, 3]}
    assert [report[f"net-p30-{p}-r8/int8_layers_count"] for p in PRECISIONS] == [0, 0, 0, 2]
    assert report["net-p30-fp32-r8/int8_ops_count"] == 0
    assert report["net-p30-i8-r8/int8_ops_count"] >= 2
    for precision in PRECISIONS:
        card, model = _card(workspace, precision), workspace / f"models/mnn/net-p30-{precision}-r8/model.mnn"
        assert card["size_bytes"] == model.stat().st_size == report[f"{card['variant']}/size_bytes"]
        assert card["mnn_sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
        assert card["labels"] == ["a", "b"]
    assert _card(workspace, "i8")["int8_layers"] == ["relu1", "clip2"]
    assert dump(workspace / "models/mnn/net-p30-w8-r8/model.mnn").biz_code == "shop"


def test_a_second_run_gives_the_same_bytes(
    converted: tuple[Path, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models, cards and lists do not depend on where, when or how often they are made."""
    first, _ = converted
    shutil.copytree(first / "models/export", tmp_path / "models/export")
    monkeypatch.chdir(tmp_path)
    convert_all(ConvertParams())
    trees = [
        {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (first, tmp_path)
    ]
    assert trees[0] == trees[1]
    assert len([name for name in trees[0] if name.startswith("models/mnn")]) == 2 * len(PRECISIONS)


def test_the_operator_lists_are_written_side_by_side(converted: tuple[Path, dict[str, float]]) -> None:
    """One row for each variant, list and operator."""
    with (converted[0] / "reports/convert_ops.csv").open(encoding="utf-8") as file:
        rows = [tuple(row.values()) for row in csv.DictReader(file) if row["variant"] == "net-p30-fp32-r8"]
    assert ("net-p30-fp32-r8", "onnx", "Conv", "3", "") in rows
    assert ("net-p30-fp32-r8", "absorbed", "Clip", "1", "") in rows
    assert ("net-p30-fp32-r8", "added", "ConvertTensor", "2", "") in rows


def test_operators_of_the_onnx_say_what_they_cost() -> None:
    """The engine's own operators of the same name have no note: nobody can choose them."""
    lists = SimpleNamespace(onnx_ops={"Conv": 2, "HardSwish": 1}, ops={"HardSwish": 1}, absorbed={}, added={})
    rows = list(_op_rows("v", lists))  # type: ignore[arg-type]  # all it reads of an audit
    assert rows[0] == ("v", "onnx", "Conv", 2, "")
    assert "ReLU6 instead" in rows[1][-1]
    assert rows[2] == ("v", "mnn", "HardSwish", 1, "")


def _edit(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8")) | changes
        kept = {key: value for key, value in card.items() if value != "absent"}
        (folder / "card.json").write_text(json.dumps(kept), encoding="utf-8")

    return edit


FAULTS: dict[str, tuple[Callable[[Path], object], type[EdgeloopError], str]] = {
    "other source": (_edit(source_sha256="0" * 64), UserError, "source_sha256"),
    "other input": (
        _edit(inputs=[{"name": "input", "shape": [1, 3, 9, 9], "dtype": "float32"}]),
        UserError,
        "says inputs",
    ),
    "layer not in the parameters": (_edit(int8_layers=["relu1"]), UserError, "int8_layers"),
    "other name": (_edit(variant="net-p30-i8-r9"), UserError, "says variant"),
    "no such name": (_edit(variant="net"), UserError, "variant name 'net'"),
    "half a card": (_edit(biz_code="absent", weight_bits="absent"), UserError, "lacks biz_code, weight_bits"),
    "card no JSON": (lambda folder: (folder / "card.json").write_text("{"), UserError, r"card\.json"),
    "no parameters": (lambda folder: (folder / "compression.json").unlink(), UserError, r"compression\.json"),
    "no model": (lambda folder: (folder / "model.onnx").unlink(), UserError, r"model\.onnx"),
    "wrong layer": (
        lambda folder: (
            write_compression(folder / "compression.json", two_conv_layers(WIDTH, names="x")),
            _edit(int8_layers=["relu1x", "clip2x"])(folder),
        ),
        EngineError,
        "'relu1x' is no tensor",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_export_leaves_the_old_models(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that does not pass stops the stage: no part of the new models replaces the old ones."""
    workspace = tmp_path
    monkeypatch.chdir(workspace)
    _export(workspace / "models/export", "i8")
    old = workspace / "models/mnn/old/model.mnn"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    spoil, kind, says = FAULTS[fault]
    spoil(workspace / "models/export/net-p30-i8-r8")
    with pytest.raises(kind, match=says):
        convert_all(ConvertParams())
    assert [str(p.relative_to(workspace)) for p in workspace.glob("models/mnn/**/*.*")] == [
        "models/mnn/old/model.mnn"
    ]


def test_without_an_export_the_stage_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line ends with exit code 2 and the next step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("convert: {}\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "dvc repro export" in capsys.readouterr().err
