"""The stage `prune`: its ladder and outs, its refusals, and that a kill or a second run changes nothing."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from nn.digit_set import write_digits
from pydantic import ValidationError

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks import prune as stage
from tasks.nn import snapshot
from tasks.nn.arch import Architecture
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.fold import fold_batch_norms
from tasks.nn.macs import macs, params
from tasks.prune import PruneParams, PruneTarget, ladder_ratios
from tasks.prune_ladder import Rung, write_html

SETTINGS = {"epochs": 1, "batch_size": 16, "latency_queries": 0}
OUTS = (
    "models/prune/checkpoint.pt",
    "reports/prune.json",
    "reports/prune_ladder.csv",
    "reports/prune_ladder.html",
)


def make_workspace(root: Path, **settings) -> Path:
    """A workspace with 60 training digits and an untrained MobileNetV3-Small as the parent."""
    write_digits(root / "data" / "prepared", {"train": 60, "val": 30, "test": 30}, size_px=32)
    torch.manual_seed(0)
    architecture = Architecture(name="mobilenet_v3_small", num_classes=10)
    checkpoint = Checkpoint(
        architecture=architecture,
        state=architecture.build().state_dict(),
        preprocess=Preprocess(size_px=32),
        labels=tuple(map(str, range(10))),
    )
    checkpoint.save(root / "models" / "train" / "checkpoint.pt")
    (root / "params.yaml").write_text(yaml.safe_dump({"prune": SETTINGS | settings}))
    return root


def start(workspace: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tasks.prune"]
    return subprocess.Popen(command, cwd=workspace, env=environment, stderr=subprocess.PIPE, text=True)


def finish(workspace: Path) -> str:
    process = start(workspace)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the stage ran, measuring the ladder."""
    workspace = make_workspace(tmp_path_factory.mktemp("prune"), latency_queries=50)
    finish(workspace)
    return workspace


def read_ladder(workspace: Path) -> list[dict[str, float]]:
    with (workspace / "reports/prune_ladder.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_the_ladder_climbs_from_20_percent_to_the_target(pruned: Path) -> None:
    """The parent, 20 % and 30 %: every rung is smaller than the one before, and has its accuracies."""
    ladder = read_ladder(pruned)
    assert [row["ratio"] for row in ladder] == [0.0, 0.2, 0.3]
    assert ladder[0]["macs_count"] > ladder[1]["macs_count"] > ladder[2]["macs_count"]
    assert ladder[2]["params_count"] / ladder[0]["params_count"] == pytest.approx(0.5, abs=0.02)
    assert all(0 <= row["val_top1"] <= 1 for row in ladder)


def test_the_checkpoint_rebuilds_the_model_of_the_last_rung(pruned: Path) -> None:
    """Its record and weights give a float model of the reported size, named p30, whose norms fold."""
    checkpoint = Checkpoint.load(pruned / "models/prune/checkpoint.pt")
    model, report = checkpoint.build(), json.loads((pruned / "reports/prune.json").read_text())
    assert checkpoint.variant("fp32").name == "mbv3s-p30-fp32-r32"
    assert params(model) == report["params_count"]
    assert macs(model, (1, 3, 32, 32)) == report["macs_count"]
    assert fold_batch_norms(model)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_the_report_compares_with_the_parent(pruned: Path) -> None:
    """Flat numbers; the cost is the parent's test accuracy minus the pruned model's, in points."""
    report = json.loads((pruned / "reports/prune.json").read_text())
    assert all(isinstance(value, int | float) for value in report.values())
    assert report["test_top1_cost_pp"] == pytest.approx(
        100 * (report["parent_test_top1"] - report["test_top1"])
    )
    assert report["macs_kept_ratio"] == report["macs_count"] / report["parent_macs_count"]
    assert report["rounds"] == 2


def test_engine_latency_lies_beside_the_outs(pruned: Path) -> None:
    """Measured times go to reports/measured, for every rung, and into no out."""
    measured = json.loads((pruned / "reports/measured/prune_latency.json").read_text())
    assert set(measured) == {"parent", "p20", "p30"}
    assert all(m["p50_ms"] > 0 and m["n"] >= 50 for m in measured.values())
    assert not any("_ms" in (pruned / out).read_text() for out in OUTS[1:])
    page = (pruned / "reports/measured/prune_ladder.html").read_text()
    assert page.count("<svg") == 2
    assert "engine latency, P50 (ms)" in page
    assert all(f"<td>{m['p50_ms']:.4f}</td>" in page for m in measured.values())


def test_the_plot_is_one_file_without_scripts(pruned: Path) -> None:
    """The ladder page draws without a network: no script, no link, only SVG."""
    page = (pruned / "reports/prune_ladder.html").read_text()
    assert "<svg" in page
    assert "fine-tuned" in page
    assert "<script" not in page
    assert "href" not in page.replace("xlink", "")


def test_a_killed_run_ends_in_the_same_bytes(pruned: Path, tmp_path: Path) -> None:
    """Killed after the first round and run again, with a snapshot of another run there: the same outs."""
    workspace = make_workspace(tmp_path)
    snapshot.save(workspace / ".edgeloop/resume/prune_round_2.pt", "another run", {"top1": 1.0})
    process, first_round = start(workspace), workspace / ".edgeloop/resume/prune_round_1.pt"
    while not first_round.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert first_round.exists(), said
    assert not (workspace / OUTS[0]).exists()
    assert "belongs to other parameters" in finish(workspace)
    for out in OUTS:
        assert (workspace / out).read_bytes() == (pruned / out).read_bytes(), out
    assert not list((workspace / ".edgeloop/resume").glob("prune*"))


def test_a_quantised_parent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning comes before quantisation; the message gives the reason and the order."""
    monkeypatch.chdir(make_workspace(tmp_path))
    float_parent = Checkpoint.load(stage.PARENT)
    Checkpoint(
        architecture=float_parent.architecture,
        state=float_parent.state,
        preprocess=float_parent.preprocess,
        labels=float_parent.labels,
        float_layers=("features.0.0",),
    ).save(stage.PARENT)
    with pytest.raises(UserError, match=r"(?s)is quantised.*before quantisation.*then quantise"):
        stage.prune(PruneParams(**SETTINGS))


def test_a_parent_of_other_classes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model trained on another label set must not be fine-tuned on this one."""
    monkeypatch.chdir(make_workspace(tmp_path))
    Path("data/prepared/labels.json").write_text(json.dumps([f"digit {n}" for n in range(10)]))
    with pytest.raises(UserError, match="the same class names"):
        stage.prune(PruneParams(**SETTINGS))


def test_a_macs_target_is_met_and_more_than_half_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A share of MACs becomes the ratio that reaches it; beyond 50 % of the channels the user is warned."""
    monkeypatch.chdir(make_workspace(tmp_path))
    target = PruneTarget(kind="macs", value=0.22)
    report = stage.prune(PruneParams(**SETTINGS, target=target, steps=1, protect=("features.0.0",)))
    assert report["macs_kept_ratio"] <= 0.22
    assert report["ratio"] > 0.5
    assert report["over_half"] == 1
    assert report["rounds"] == 1
    assert "more than half" in capfd.readouterr().err
    percent = round(100 * report["ratio"])
    assert Checkpoint.load(stage.CHECKPOINT).pruned_percent == percent


def test_a_latency_target_measures_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds come from the engine; a target that no pruning reaches says what was measured."""
    monkeypatch.chdir(make_workspace(tmp_path))
    target = PruneTarget(kind="latency", value=1e-6)
    with pytest.raises(UserError, match=r"removing 90% of the channels still costs 0\.\d+"):
        stage.prune(PruneParams(epochs=1, latency_queries=50, target=target))


@pytest.mark.parametrize(("noisy", "said"), [(2, False), (9, True)])
def test_a_noisy_measurement_is_repeated(
    noisy: int,
    said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A latency target takes the first quiet measurement of three, and says so when none was."""
    monkeypatch.chdir(make_workspace(tmp_path))
    taken: list[float] = []

    def measure(*_: object, **__: object) -> dict[str, SimpleNamespace]:
        taken.append(len(taken) + 1.0)
        flags = ("noisy",) if len(taken) <= noisy else ()
        return {"candidate": SimpleNamespace(p50_ms=taken[-1], flags=flags)}

    monkeypatch.setattr(stage, "measure_models", measure)
    climb = stage._Climb(PruneParams(**SETTINGS), stage._parent(), stage.Dataset.open(stage.DATA), None)
    assert climb.latency_ms(climb.parent) == 3.0
    assert len(taken) == 3
    assert ("noisy host" in capfd.readouterr().err) is said


def test_sensitivity_is_reported_per_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ratios given, the report holds the accuracy of each group pruned alone."""
    monkeypatch.chdir(make_workspace(tmp_path))
    report = stage.prune(
        PruneParams(
            **SETTINGS, steps=1, sensitivity_ratios=(0.5,), protect=("features.[2-9]*", "features.1[01]*")
        )
    )
    layers = {key.split("/")[1] for key in report if key.startswith("sensitivity/")}
    assert layers == {"features.0.0", "features.1.block.2.0", "features.12.0", "classifier.0"}
    assert 0 <= report["sensitivity/classifier.0/val_top1_at_50_percent"] <= 1


@pytest.mark.parametrize(
    ("ratio", "steps", "expected"),
    [
        (0.3, None, [0.2, 0.3]),
        (0.6, None, [0.2, 0.3, 0.4, 0.5, 0.6]),
        (0.1, None, [0.1]),
        (0.2, None, [0.2]),
        (0.3, 2, [0.2, 0.3]),
        (0.3, 5, [0.2, 0.225, 0.25, 0.275, 0.3]),
        (0.1, 2, [0.05, 0.1]),
        (0.37, 1, [0.37]),
    ],
)
def test_rounds_rise_evenly_to_the_target(ratio: float, steps: int | None, expected: list[float]) -> None:
    """From 20 % in steps of 10 %, or evenly in as many rounds as asked for; the last is the target."""
    assert ladder_ratios(ratio, steps) == pytest.approx(expected)
    assert ladder_ratios(ratio, steps)[-1] == ratio


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": {"kind": "ratio", "value": 0}},
        {"target": {"kind": "ratio", "value": 0.95}},
        {"target": {"kind": "ratio", "value": float("nan")}},
        {"target": {"kind": "macs", "value": 1.0}},
        {"target": {"kind": "latency", "value": -1}},
        {"target": {"kind": "latency", "value": 5}, "latency_queries": 0},
        {"target": {"kind": "speed", "value": 0.5}},
        {"round_to": 0},
        {"steps": 0},
        {"protct": ["features.0.0"]},
    ],
)
def test_impossible_parameters_are_refused(wrong: dict) -> None:
    """Each is caught when params.yaml is read, before anything is computed."""
    with pytest.raises(ValidationError):
        PruneParams(**wrong)


def test_the_plot_page_is_the_same_each_time_and_escapes_its_title(tmp_path: Path) -> None:
    """No random ids, no dates; a title with markup stays text."""
    rung = Rung(
        ratio=0.3,
        channels_removed_ratio=0.3,
        macs_count=5,
        params_count=3,
        val_top1_pruned=0.5,
        val_top1=0.9,
    )
    for name in ("a.html", "b.html"):
        write_html([rung, rung], "<script>x</script>", tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert "<script" not in (tmp_path / "a.html").read_text()
