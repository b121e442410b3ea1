"""`python -m tasks.ptq` and `tasks.sensitivity` as people run them, on the committed digits models."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from golden_digits import ROOT, write_workspace

import tasks.ptq
import tasks.sensitivity
from fleet.device.errors import UserError
from tasks.data.dataset import Dataset
from tasks.int8_trial import Start, ask_engine, calibrated, inputs_of, to_engine
from tasks.mnn.ptq_tool import layer_tensors
from tasks.nn.evaluate import evaluate
from tasks.ptq import calibrations, compare
from tasks.sensitivity import skip_yaml, trials_of, try_in_engine

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("golden") / "w")


@pytest.fixture
def start(workspace, monkeypatch) -> Start:
    monkeypatch.chdir(workspace)
    return Start.of_workspace()


def run(module: str, workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=workspace,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


def last_document(stdout: str) -> dict:
    return json.loads(stdout[stdout.index("{") :])


def test_methods_stand_beside_qat_with_their_intervals(start):
    """Every row is measured on the same images against the same float model; bad images are warned about."""
    rows = {row.name: row for row in compare(start, ["max_abs", "EMA"], [40, 40])}
    assert list(rows) == [
        "fp32",
        "qat",
        *(f"{m}-{c}-40" for c in ("scene", "noise", "train") for m in ("max_abs", "EMA")),
    ]
    labels = start.dataset.split("test").labels
    floating = rows["fp32"].answers
    assert floating.int8_ops_count == 0
    assert floating.top1 > 0.9
    for name, row in rows.items():
        assert len(row.answers.classes) == len(labels) == 200
        if name == "fp32":
            continue
        assert row.drop.drop_pp == pytest.approx(100 * (floating.top1 - row.answers.top1))
        assert row.drop.low_pp <= row.drop.drop_pp <= row.drop.high_pp
        assert row.agreement == (row.answers.classes == floating.classes).mean()
        assert row.answers.int8_ops_count > 80
        assert row.int8_layers_count == (54 if "EMA" in name else 51)
    assert "look like noise" in rows["max_abs-noise-40"].warning
    assert "40 in the training set of this workspace" in rows["EMA-train-40"].warning
    assert rows["max_abs-scene-40"].warning == "only 40 images"
    assert rows["qat"].warning == ""


def test_a_method_that_fails_is_a_row_that_says_why(start):
    """The others go on."""
    rows = {row.name: row for row in compare(start, ["ADMM", "mse"], [100], timeout_s=3)}
    assert rows["ADMM-scene-100"].failure.startswith("MNN's ADMM: ran past its limit of 3 s")
    assert "top1" not in rows["ADMM-scene-100"].values()
    assert rows["mse-scene-100"].values()["top1"] > 0.9


def test_calibration_images_come_from_where_they_may(start):
    """First the calibration split, then val, and no more; train only as the bad case, test never."""
    data = start.dataset
    sets = {c.name: c.images for c in calibrations(start, [60, 500, 1000])}
    assert list(sets) == ["scene-60", "noise-60", "train-60", "scene-250"]
    calibration = data.split("calibration").images(range(100))
    val = data.split("val").images(range(150))
    assert np.array_equal(sets["scene-60"], calibration[:60])
    assert np.array_equal(sets["scene-250"], np.concatenate([calibration, val]))
    assert np.array_equal(sets["train-60"], data.split("train").images(range(60)))


def test_skipped_layers_stay_float_in_the_engine(start, tmp_path):
    """A squeeze-excite block's layer, a depthwise one, a pattern: none runs in int8, and the engine answers
    as the fake-quant model does.
    """
    skip = ("first", "last", "features.1.block.1.fc1", "features.4.block.1.0", "features.9.*")
    images = inputs_of(start.split("calibration").images(range(60)), start.preprocess)
    model = calibrated(start.parent, images, "mse", skip)
    conversion = to_engine(model, start.parent, tmp_path)
    test = start.split("test")
    answers = ask_engine(conversion.path, start.preprocess, test, "test")
    (onnx,) = tmp_path.glob("*/model.onnx")
    left = tuple(model.plan.left_float)
    assert {"features.1.block.1.fc1", "features.4.block.1.0", "features.9.block.2.fc2"} <= set(left)
    assert not set(layer_tensors(onnx, left)) & set(answers.int8_ops)
    assert set(layer_tensors(onnx, tuple(model.layers))) <= set(answers.int8_ops)
    said = evaluate(model.graph, test, start.preprocess).predictions
    assert (said == answers.classes).mean() >= 0.99
    assert answers.top1 > 0.9


def test_a_skip_list_is_tried_in_the_engine(start):
    """Fewer int8 operators after than before, both against the same float model."""
    trials = trials_of(start, "mse", 20)
    tried = try_in_engine(start, trials, ("features.1.block.0.0",))
    assert tried.after_int8_ops_count < tried.before_int8_ops_count
    assert tried.before.n == tried.after.n == 200
    assert tried.float_layers_have_int8_weights


def test_the_ranking_is_written_for_people_and_programs(workspace):
    """JSON on stdout is the report; a row a layer in the table and the plot; params.yaml is untouched."""
    params = (workspace / "params.yaml").read_bytes()
    done = run("tasks.sensitivity", workspace, "--images", "12", "--budget-pp", "50", "--json")
    assert done.returncode == 0, done.stderr
    values = last_document(done.stdout)
    assert values == json.loads((workspace / "reports/sensitivity.json").read_text())
    assert values["n"] == 12
    assert values["skip"] == ["first", "last"]
    assert values["val_after_n"] == 150
    assert values["test_after_n"] == 200
    rows = list(csv.DictReader((workspace / "reports/sensitivity.csv").open()))
    assert len(rows) == values["layers_count"] == 51
    assert rows[0]["layer"] == values["worst_layer"]
    svg = (workspace / "reports/sensitivity.svg").read_text()
    assert svg.startswith("<svg")
    assert all(row["layer"] in svg for row in rows)
    assert (workspace / "params.yaml").read_bytes() == params


def test_the_yaml_is_what_params_takes():
    """Copying the printed lines into params.yaml works."""
    import yaml

    from tasks.quantize import QuantizeParams

    text = skip_yaml(["first", "features.1.*", "features.2.block.0.0"])
    parsed = QuantizeParams.model_validate(yaml.safe_load(text)["quantize"])
    assert parsed.skip == ("first", "features.1.*", "features.2.block.0.0")


def _copy(workspace: Path, to: Path) -> Path:
    for path in workspace.rglob("*"):
        inside = path.relative_to(workspace)
        if path.is_file() and inside.parts[0] not in {"reports", ".edgeloop"}:
            target = to / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


BROKEN = {
    "no workspace": (lambda w: (w / "params.yaml").unlink(), "params.yaml"),
    "no data": (lambda w: (w / "data/prepared/manifest.parquet").unlink(), "dataset"),
    "no checkpoint": (lambda w: (w / "models/prune/checkpoint.pt").unlink(), "checkpoint models/prune"),
    "cut checkpoint": (
        lambda w: os.truncate(w / "models/prune/checkpoint.pt", 5000),
        "checkpoint models/prune",
    ),
    "misspelt params": (lambda w: (w / "params.yaml").write_text("quantize: {skipp: []}"), "skipp"),
    "other classes": (lambda w: (w / "data/prepared/labels.json").write_text('["a"]'), "10 classes"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_workspace_that_is_not_built_is_one_clear_error(kind, workspace, tmp_path, monkeypatch, capsys):
    """Exit code 2, a next step, nothing written."""
    broken = _copy(workspace, tmp_path / "w")
    spoil, expected = BROKEN[kind]
    spoil(broken)
    before = sorted(broken.rglob("*"))
    monkeypatch.chdir(broken)
    monkeypatch.setattr(sys, "argv", ["tool", "--json"])
    for main in (tasks.ptq.main, tasks.sensitivity.main):
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == 2
        assert expected in said.err
        assert "next:" in said.err
        assert last_document(said.out)["exit_code"] == 2
    after = [path for path in sorted(broken.rglob("*")) if ".edgeloop" not in path.parts]
    assert after == before
    if kind == "no workspace":
        assert not (broken / ".edgeloop").exists()


def test_missing_models_and_splits_are_named(workspace, tmp_path, monkeypatch):
    """The variant that was not converted, the split that is empty."""
    broken = _copy(workspace, tmp_path / "w")
    monkeypatch.chdir(broken)
    (broken / "models/mnn/mbv3s-p30-i8-r48/model.mnn").unlink()
    with pytest.raises(UserError, match=r"mbv3s-p30-i8-r48/model.mnn is missing"):
        list(compare(Start.of_workspace(), ["mse"], [50]))
    dataset = Dataset.open(broken / "data/prepared")
    manifest = dataset.manifest
    for split in ("val", "calibration"):
        manifest[manifest["split"] != split].to_parquet(broken / "data/prepared/manifest.parquet")
        with pytest.raises(UserError, match=f"no images in the split `{split}`"):
            trials_of(Start.of_workspace(), "mse", 10)
    manifest.assign(label=-1).to_parquet(broken / "data/prepared/manifest.parquet")
    with pytest.raises(UserError, match="no labelled images in the split `val`"):
        trials_of(Start.of_workspace(), "mse", 10)


def command_of(process: psutil.Process) -> str:
    """Its command line; empty when it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_comparison_leaves_nothing_behind(sent, workspace, tmp_path):
    """Exit code 130, MNN's tool ended with it, no half report, and the next run is not locked out."""
    place = _copy(workspace, tmp_path / "w")
    command = [sys.executable, "-m", "tasks.ptq", "--methods", "ADMM", "--images", "100", "--json"]
    process = subprocess.Popen(
        command, cwd=place, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    us, children = psutil.Process(process.pid), []
    deadline = time.monotonic() + 120
    while not children and time.monotonic() < deadline and process.poll() is None:
        children = [child for child in us.children(recursive=True) if "ptq_child" in command_of(child)]
        time.sleep(0.05)
    assert children
    process.send_signal(sent)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ptq: interrupted\n" in said
    assert last_document(printed) == {"ok": False, "error": "interrupted", "exit_code": 130}
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert not (place / "reports").exists()


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (tasks.ptq.main, ("--images", "0")),
        (tasks.ptq.main, ("--methods", "MAGIC")),
        (tasks.sensitivity.main, ("--images", "0")),
        (tasks.sensitivity.main, ("--budget-pp", "-1")),
        (tasks.sensitivity.main, ("--budget-pp", "nan")),
    ],
)
def test_options_that_mean_nothing_are_refused(main, arguments, workspace, monkeypatch):
    """Zero images, an unknown method, a budget that is negative or no number."""
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["tool", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
