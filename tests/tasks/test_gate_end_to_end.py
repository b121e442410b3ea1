"""Bad builds made of real models: what `edgeloop build` says, and that nothing of them is registered."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from clones import TinyBuild, edgeloop, environment
from gate_workspace import by_verdict, digest
from mlflow import MlflowClient
from nn.digit_set import write_digits

from fleet.device.engine import ENGINE_VERSION
from fleet.device.errors import UserError
from tasks import register
from tasks.champion import Champion, ChampionVariant, write_champion
from tasks.convert import ConvertParams, convert_all
from tasks.export import ExportParams, Variants, export
from tasks.gate import GateParams, gate, require_judged
from tasks.nn.checkpoint import Checkpoint
from tasks.parity import ParityParams, parity, write_predictions
from tasks.stage import load_params, read_json, write_json

ROOT = Path(__file__).resolve().parents[2]
INT8 = "mbv3s-p30-i8-r32"


@pytest.fixture
def built(tiny_build, tmp_path):
    """A copy of the built tiny workspace with its repository, to be spoilt."""
    clone = tmp_path / "edgeloop"
    shutil.copytree(tiny_build.clone, clone, symlinks=True)
    return TinyBuild(clone, tiny_build.result, tiny_build.stderr)


def _versions(built):
    client = MlflowClient(f"sqlite:///{built.clone}/.edgeloop/mlflow.db")
    return [int(v.version) for v in client.search_model_versions("name = 'edgeloop-tiny'")]


def _build(built):
    done = edgeloop(built.clone, "build", "--preset", "tiny", "--json")
    return done.returncode, json.loads(done.stdout)


def _swap(built):
    """Put the float model's file in the place of the int8 one's."""
    models = built.workspace / "models" / "mnn"
    shutil.copyfile(models / "mbv3s-p0-fp32-r32" / "model.mnn", models / INT8 / "model.mnn")


def test_a_swapped_file_is_built_again_and_never_registered(built):
    """DVC sees other bytes than convert wrote: they are replaced, and the version stays the one there was."""
    model = built.workspace / "models" / "mnn" / INT8 / "model.mnn"
    right = digest(model.read_bytes())
    _swap(built)
    code, result = _build(built)
    assert code == 0, result
    assert digest(model.read_bytes()) == right
    assert _versions(built) == [1]


def test_a_swapped_file_that_someone_committed_stops_the_build(built):
    """`dvc commit` makes DVC believe in the file; parity does not, since the card is of another."""
    _swap(built)
    command = [sys.executable, "-m", "dvc", "commit", "--force", "convert"]
    env = environment(built.clone)
    subprocess.run(command, cwd=built.workspace, env=env, check=True, capture_output=True)
    code, result = _build(built)
    assert code == 2
    assert f"{INT8}: the card's mnn_sha256" in result["error"]
    assert _versions(built) == [1]


def test_a_swapped_file_is_refused_by_the_gate_itself(built):
    """Judged by hand, without DVC: card, parity and benchmark are about another file; not registered."""
    _swap(built)
    params = GateParams(min_top1=0.05, max_prune_drop_pp=100, max_precision_drop_pp=100, min_agreement=0.5)
    report = gate(built.workspace, params)
    write_json(built.workspace / "reports" / "gate.json", report)
    assert list(by_verdict(report, "fail")) == [f"{INT8}: evidence is about this file"]
    with pytest.raises(UserError, match=r"the gate refused this build: .*evidence is about this file"):
        register.verify_evidence(built.workspace)


def test_a_verdict_edited_to_pass_is_judged_again(built):
    """A refused build whose gate.json is made to say `pass`: judged again, refused, not registered."""
    params = built.workspace / "params.yaml"
    params.write_text(params.read_text(encoding="utf-8").replace("min_top1: 0.05", "min_top1: 1.0"), "utf-8")
    path = built.workspace / "reports" / "gate.json"
    report = gate(built.workspace, load_params("gate", GateParams, built.workspace))
    assert report["verdict"] == "fail"
    write_json(path, report | {"verdict": "pass"})
    with pytest.raises(UserError, match="is not what the gate judged"):
        require_judged(built.workspace, read_json(path))
    code, result = _build(built)
    assert (code, result["registered"]) == (1, None)
    assert read_json(path)["verdict"] == "fail"
    assert _versions(built) == [1]


def test_a_better_champion_refuses_the_build(built):
    """Only the gate runs again: against a champion that is right on all images this build is a regression."""
    source = built.workspace / "models" / "parity" / "predictions.parquet"
    table = pd.read_parquet(source)
    perfect = built.clone / "perfect.parquet"
    table.assign(**{INT8: table["label"]})[["sha256", "label", INT8]].to_parquet(perfect, index=False)
    card = read_json(built.workspace / "models" / "mnn" / INT8 / "card.json")
    champion = Champion(
        name="edgeloop-tiny",
        version=7,
        release_sha256="a" * 64,
        evidence_sha256="b" * 64,
        git_commit="c" * 40,
        labels=tuple(reversed(card["labels"])),
        variants={INT8: ChampionVariant(mnn_sha256="d" * 64, size_bytes=1, top1=1.0)},
        predictions_sha256="",
    )
    table = pd.read_parquet(perfect)
    last = len(card["labels"]) - 1
    table[["label", INT8]] = (last - table[["label", INT8]]).astype("int16")  # its classes in reverse order
    table.to_parquet(perfect, index=False)
    record = champion.model_copy(update={"predictions_sha256": digest(perfect.read_bytes())})
    write_champion(built.workspace / "champion", record, perfect)
    code, result = _build(built)
    assert (code, result["registered"]) == (1, None)
    failed = by_verdict(result["gate"], "fail")
    assert f"{INT8}: accuracy lost against the champion" in failed
    assert "edgeloop-tiny version 7" in failed[f"{INT8}: accuracy lost against the champion"]["evidence"]
    comparison = read_json(built.workspace / "reports" / "gate.json")["comparison"]
    top1 = read_json(built.workspace / "reports" / "parity.json")[f"{INT8}/top1"]
    assert comparison[INT8]["drop_pp"] == pytest.approx(100 * (1 - top1), abs=0.01)
    assert _versions(built) == [1]


FP32 = "mbv3s-p30-fp32-r48"


def _judge_checkpoint(folder, checkpoint, monkeypatch):
    """Export, convert and judge the fp32 form of a checkpoint on real digits."""
    write_digits(folder / "data/prepared", {"train": 2, "val": 1, "calibration": 1, "test": 120}, size_px=32)
    Checkpoint.load(ROOT / "models/golden/digits-mbv3s-p0-fp32-r48.pt").save(
        folder / "models/train/checkpoint.pt"
    )
    checkpoint.save(folder / "models/prune/checkpoint.pt")
    monkeypatch.chdir(folder)
    export(ExportParams(variants=Variants(trained=("fp32",), pruned=("fp32",))))
    write_json(Path("reports/convert.json"), convert_all(ConvertParams()))
    report, predictions = parity(ParityParams(images=8))
    write_predictions(predictions, Path("models/parity/predictions.parquet"))
    write_json(Path("reports/parity.json"), report)
    write_json(Path("reports/benchmark/local.json"), {})
    write_json(Path("reports/probe/local.json"), {"engine_version": ENGINE_VERSION})
    write_champion(Path("champion"))
    return gate(folder, GateParams(max_prune_drop_pp=100))


def test_a_wrong_mean_and_std_are_found_by_the_accuracy_floor(tmp_path, monkeypatch):
    """Card and parity agree with each other and with the engine; only the images tell what is wrong."""
    right = Checkpoint.load(ROOT / "models/golden/digits-mbv3s-p30-fp32-r48.pt")
    half = replace(right.preprocess, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    for name, checkpoint, refused in (
        ("right", right, []),
        ("wrong", replace(right, preprocess=half), [f"{FP32}: accuracy floor"]),
    ):
        report = _judge_checkpoint(tmp_path / name, checkpoint, monkeypatch)
        assert list(by_verdict(report, "fail")) == refused
        assert f"{FP32}: preprocessing is the proven one" in by_verdict(report, "pass")
