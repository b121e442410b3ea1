"""The stage train in a workspace: what it writes, what it refuses, and two processes that agree."""

import contextlib
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.loop import evaluate
from tasks.stage import write_json
from tasks.train import TrainParams, _say_unusual, main, train

ROOT = Path(__file__).resolve().parents[2]
SECTION: dict[str, Any] = {
    "preprocess": {"size_px": 32},
    "epochs": 1,
    "batch_size": 16,
    "bn_momentum": 0.3,
    "seed": 5,
}

TWO_RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def write_workspace(root: Path, section: dict[str, Any], *, validated: bool = True) -> Path:
    """A workspace with 48 training images of two classes that colour tells apart."""
    prepared = root / "data" / "prepared"
    prepared.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for split, count in {"train": 48, "val": 10, "test": 11}.items():
        labels = np.arange(count) % 2
        pixels = rng.integers(0, 80, (count, 24, 24, 3), np.uint8)
        pixels[np.arange(count), :, :, 2 * labels] += 150
        np.save(prepared / f"{split}-000.npy", pixels)
        rows += [
            {
                "sha256": hashlib.sha256(image.tobytes()).hexdigest(),
                "label": int(label),
                "split": split,
                "source": f"{split} {row}",
                "width": 24,
                "height": 24,
                "group": "",
                "origin": "base",
                "added_in": "",
                "shard": f"{split}-000.npy",
                "row": row,
            }
            for row, (image, label) in enumerate(zip(pixels, labels, strict=True))
        ]
    pd.DataFrame(rows).to_parquet(prepared / "manifest.parquet")
    (prepared / "labels.json").write_text(json.dumps(["red", "blue"]))
    (root / "params.yaml").write_text(yaml.safe_dump({"train": section}))
    (root / "reports").mkdir()
    if validated:
        (root / "reports" / "validate.json").write_text('{"critical_failures_count": 0}')
    return root


def pinned(file: Path) -> dict[str, str]:
    """A file to start from, with its hash."""
    return {"file": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def run_stage(workspace: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    """`python -m tasks.train`, or another command, in the workspace."""
    return subprocess.run(
        launcher or [sys.executable, "-m", "tasks.train"],
        cwd=workspace,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The children run with one thread; bits are equal for equal numbers of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = write_workspace(tmp_path_factory.mktemp("train") / "workspace", SECTION)
    with contextlib.chdir(workspace):
        write_json(Path("reports/train.json"), train(TrainParams.model_validate(SECTION)))
    return workspace


def test_report_is_what_the_checkpoint_does(built: Path) -> None:
    """The accuracies in the report are those of the checkpoint on the splits, and the size is its size."""
    report = json.loads((built / "reports" / "train.json").read_text())
    checkpoint = Checkpoint.load(built / "models" / "train" / "checkpoint.pt")
    dataset = Dataset.open(built / "data" / "prepared")
    model = checkpoint.build()
    for split in ("val", "test"):
        measured = evaluate(model, dataset.split(split), checkpoint.preprocess).top1
        assert report[f"{split}_top1"] == pytest.approx(measured)
    assert checkpoint.labels == ("red", "blue")
    assert checkpoint.preprocess == Preprocess(size_px=32)
    assert report["params_count"] == sum(p.numel() for p in model.parameters())
    assert report["macs_count"] == 2_161_600
    assert report["init_tensors_loaded_count"] == 0
    assert all(isinstance(value, int | float) for value in report.values())


def test_curves_have_a_line_for_each_epoch(built: Path) -> None:
    """reports/train_curves.csv holds what the report summarises."""
    report = json.loads((built / "reports" / "train.json").read_text())
    with (built / "reports" / "train_curves.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["epoch"] for line in lines] == ["1"]
    assert float(lines[0]["val_top1"]) == report["val_top1"]
    assert 0 < float(lines[0]["train_loss"]) < 5


def test_same_params_same_bytes(built: Path, tmp_path: Path) -> None:
    """The stage in another process and folder writes the same checkpoint, report and curves."""
    again = write_workspace(tmp_path / "elsewhere", SECTION)
    done = run_stage(again)
    assert done.returncode == 0, done.stderr
    for name in ("models/train/checkpoint.pt", "reports/train.json", "reports/train_curves.csv"):
        assert (built / name).read_bytes() == (again / name).read_bytes()


def test_starts_from_a_checkpoint_with_other_classes(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init.file takes the backbone of another training; what was loaded is counted in the report."""
    file = built / "models" / "train" / "checkpoint.pt"
    workspace = write_workspace(tmp_path / "workspace", SECTION)
    (workspace / "data" / "prepared" / "labels.json").write_text(json.dumps(["red", "blue", "unseen"]))
    monkeypatch.chdir(workspace)
    report = train(TrainParams.model_validate({**SECTION, "init": pinned(file)}))
    assert (report["init_tensors_loaded_count"], report["init_tensors_fresh_count"]) == (242, 2)


def test_teacher_must_know_the_same_classes(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher with other labels or another input contract is refused before any training."""
    file = built / "models" / "train" / "checkpoint.pt"
    workspace = write_workspace(tmp_path / "workspace", SECTION)
    monkeypatch.chdir(workspace)
    teacher = {"teacher": pinned(file)}
    with pytest.raises(UserError, match=r"train\.teacher"):
        train(TrainParams.model_validate({**SECTION, **teacher, "preprocess": {"size_px": 48}}))
    assert not (workspace / "models").exists()
    report = train(TrainParams.model_validate({**SECTION, **teacher}))
    plain = json.loads((built / "reports" / "train.json").read_text())
    assert report["params_count"] == plain["params_count"]
    state = Checkpoint.load(workspace / "models" / "train" / "checkpoint.pt").state
    other = Checkpoint.load(file).state
    assert not all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"epochs": 0}, "train.epochs"),
        ({"learning_rat": 1}, "learning_rat"),
        ({"init": "imagenet"}, "torchvision"),
        ({"activation": "gelu"}, "relu6"),
        ({"augment": {"flip": "sometimes"}}, "flip"),
    ],
)
def test_misspelt_params_are_one_clear_error(
    section: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one message that names the parameter, and nothing written."""
    workspace = write_workspace(tmp_path / "workspace", {**SECTION, **section})
    monkeypatch.chdir(workspace)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert "next:" in message
    assert not (workspace / "models").exists()
    assert not (workspace / "reports" / "train.json").exists()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"architecture": "mobilenet_v9"}, "mobilenet_v3_small"),
        ({"preprocess": {"size_px": 5000}}, "size_px"),
        ({"preprocess": {"size_px": 20}, "architecture": "alexnet"}, "size_px = 20 with alexnet"),
        ({"init": {"file": "absent.pt", "sha256": "0" * 64}}, "absent.pt"),
    ],
)
def test_params_that_do_not_work_are_refused(
    section: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the model or the disk can tell is refused before training, and nothing is written."""
    workspace = write_workspace(tmp_path / "workspace", SECTION)
    monkeypatch.chdir(workspace)
    with pytest.raises(UserError, match=words):
        train(TrainParams.model_validate({**SECTION, **section}))
    assert not (workspace / "models").exists()


def test_data_that_was_not_validated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the report of validate there is no training."""
    monkeypatch.chdir(write_workspace(tmp_path / "workspace", SECTION, validated=False))
    with pytest.raises(UserError, match=r"validate\.json"):
        train(TrainParams.model_validate(SECTION))


def test_data_that_validate_refused_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written on a critical failure too; training on leaking data must not start."""
    workspace = write_workspace(tmp_path / "workspace", SECTION)
    (workspace / "reports" / "validate.json").write_text('{"critical_failures_count": 1}')
    monkeypatch.chdir(workspace)
    with pytest.raises(UserError, match="critical_failures_count 1"):
        train(TrainParams.model_validate(SECTION))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((352, 2_000_000, 200_000_000), ["input 352 px is larger than the usual 320 px"]),
        (
            (320, 724_000, 200_000_000),
            ["0.724 M parameters are outside the usual 1 to 20 M; measured latency decides"],
        ),
        (
            (224, 20_000_000, 1_000_500_000),
            ["2001 M FLOPs an image of 224 px are outside the usual 100 to 2000 M; measured latency decides"],
        ),
        (
            (112, 20_000_000, 250_500_000),
            ["501 M FLOPs an image of 112 px are outside the usual 25 to 500 M; measured latency decides"],
        ),
        ((224, 1_000_000, 50_000_000), []),
        ((112, 1_000_000, 12_500_000), []),
    ],
)
def test_unusual_sizes_are_said(
    size: tuple[int, int, int], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Input, parameters and FLOPs beyond the usual range get a line each on stderr; the bounds are usual."""
    _say_unusual(size[0], params_count=size[1], macs_count=size[2])
    assert capsys.readouterr().err.splitlines() == [f"train: {line}" for line in said]


@pytest.mark.parametrize(
    "report", [ROOT / "reports/train.json", *sorted(ROOT.glob("presets/*/reports/train.json"))]
)
def test_our_own_presets_are_usual(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A build of a preset starts without a remark on the model we chose for it."""
    trained = json.loads(report.read_text(encoding="utf-8"))
    _say_unusual(trained["size_px"], params_count=trained["params_count"], macs_count=trained["macs_count"])
    assert capsys.readouterr().err == ""


RANK = """
import torch
from tasks import train as stage
from tasks.nn import distributed

fit = stage.fit

def keep_a_copy(*positional, **named):
    result = fit(*positional, **named)
    torch.save({"state": result.state, "top1": result.val_top1}, f"rank{distributed.rank()}.pt")
    return result

stage.fit = keep_a_copy
stage.main()
"""


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    """torchrun with two ranks: one checkpoint, one report that is true of it, and ranks equal to the bit."""
    workspace = write_workspace(tmp_path / "workspace", {**SECTION, "epochs": 2, "ema_decay": 0.9})
    (workspace / "ranks.py").write_text(RANK)
    done = run_stage(workspace, *TWO_RANKS, "ranks.py")
    assert done.returncode == 0, done.stderr
    written = sorted(str(p.relative_to(workspace)) for p in (workspace / "models").rglob("*") if p.is_file())
    assert written == ["models/train/checkpoint.pt"]
    checkpoint = Checkpoint.load(workspace / "models" / "train" / "checkpoint.pt")
    report = json.loads((workspace / "reports" / "train.json").read_text())
    test = Dataset.open(workspace / "data" / "prepared").split("test")
    assert evaluate(checkpoint.build(), test, checkpoint.preprocess).top1 == report["test_top1"]
    first, second = (torch.load(workspace / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["top1"] == second["top1"]
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in first["state"])
