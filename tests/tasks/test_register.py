"""Registering: only what the gate let pass, with evidence for these bytes, and each set of bytes once."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fleet.device.errors import UserError
from tasks import register
from tasks.gate import GateParams, gate
from tasks.report.write import Drawn, write_report
from tasks.review.acts import act
from tasks.review.author import Author
from tasks.review.ledger import Ledger
from tasks.stage import load_params, read_json, write_json
from tasks.workspace import Workspace


@pytest.fixture
def built(tiny_build, tmp_path):
    """A copy of the built tiny workspace without its data, in a repository of its own."""
    (tmp_path / ".dvc").mkdir()
    path = tmp_path / "presets" / "tiny"
    ignored = shutil.ignore_patterns("data", "data_docs", "train", "prune", "quantize", "export")
    shutil.copytree(tiny_build.workspace, path, ignore=ignored, symlinks=True)
    return Workspace(name="tiny", path=path, repository=tmp_path)


def _state(repository: Path) -> Path:
    (repository / ".edgeloop").mkdir(exist_ok=True)
    return repository / ".edgeloop"


@pytest.fixture
def store(tiny_build, tmp_path, monkeypatch):
    """A copy of the store the tiny build wrote to: creating one anew takes seconds."""
    database = tmp_path / "mlflow.db"
    shutil.copy2(tiny_build.clone / ".edgeloop" / "mlflow.db", database)
    shutil.copy2(tiny_build.clone / ".edgeloop" / "ledger.jsonl", _state(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    return MlflowClient(f"sqlite:///{database}")


def _edit(report: Path, **values) -> None:
    record = json.loads(report.read_text(encoding="utf-8")) | values
    report.write_text(json.dumps(record), encoding="utf-8")


def test_the_same_bytes_are_registered_once(built, store):
    """Registering again what version 1 holds gives version 1, whichever build made it."""
    assert register.register(built, "build-again").version == 1


def _judge(workspace: Path, **thresholds) -> None:
    """Run the gate again on what lies there."""
    params = load_params("gate", GateParams, workspace).model_copy(update=thresholds)
    write_json(workspace / "reports" / "gate.json", gate(workspace, params))


def test_a_card_changed_after_the_gate_is_refused(built):
    """A card says how the model is fed: it is evidence as the model is."""
    _edit(next((built.path / "models" / "mnn").glob("*/card.json")), biz_code="another")
    with pytest.raises(UserError, match=r"card\.json is not what the gate judged"):
        register.verify_evidence(built.path)


def test_a_threshold_edited_in_the_verdict_is_refused(built):
    """The checks are part of what is hashed."""
    report = json.loads((built.path / "reports" / "gate.json").read_text(encoding="utf-8"))
    report["checks"][0]["threshold"] = 0.0
    _edit(built.path / "reports" / "gate.json", checks=report["checks"])
    with pytest.raises(UserError, match="not what the gate judged"):
        register.verify_evidence(built.path)


def test_the_same_bytes_judged_by_other_thresholds_are_reviewed_anew(built, store):
    """A rejected version does not come back as candidate: new evidence is a new version, pending."""
    store.set_model_version_tag("edgeloop-tiny", "1", "review_state", "rejected")
    _judge(built.path, max_size_mb=9.0)
    assert register.register(built, "build-judged").version == 2
    assert store.get_model_version("edgeloop-tiny", "2").tags["review_state"] == "pending"
    assert store.get_model_version("edgeloop-tiny", "1").tags["review_state"] == "rejected"


def test_other_bytes_are_a_new_version_and_the_candidate(built, store):
    """A changed card is another release: version 2, which becomes the candidate."""
    card = next((built.path / "models" / "mnn").glob("*/card.json"))
    _edit(card, biz_code="another")
    _judge(built.path)
    assert register.register(built, "build-new").version == 2
    assert store.get_registered_model("edgeloop-tiny").aliases == {"candidate": 2}
    tags = {v: store.get_model_version("edgeloop-tiny", v).tags["release_sha256"] for v in ("1", "2")}
    assert tags["1"] != tags["2"] == register.release_sha256(built.path / "models" / "mnn")


def test_the_champion_does_not_become_a_candidate_again(built, store):
    """Rebuilding what is released already leaves nothing to review; what was rejected does not come back."""
    for version, decision, aliases in (("1", "approved", {"champion": 1}), ("1", "rejected", {})):
        act(built.repository, decision, "tiny", int(version), who=Author(name="Ada", source="--by"), why="so")
        _judge(built.path)  # another champion is other evidence
        assert register.register(built, f"build-{decision}").version == 1
        assert store.get_registered_model("edgeloop-tiny").aliases == aliases


def test_a_version_carries_all_it_is_reviewed_by(built, store):
    """Below `release/` of its run: models, cards, reports, predictions, as they lie in the workspace."""
    _judge(built.path, max_size_mb=9.0)
    version = store.get_model_version("edgeloop-tiny", str(register.register(built, "build-files").version))
    folder = Path(version.source.removeprefix("file://"))
    logged = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    evidence = json.loads((built.path / "reports" / "gate.json").read_text(encoding="utf-8"))["evidence"]
    files = register.release_files(built.path)
    assert set(map(register.artifact_of, evidence)) < set(files)
    assert logged == {artifact: file.read_bytes() for artifact, file in files.items()}
    kept = {"gate.json", "gate.md", "dvc.lock", "params.yaml", "predictions.parquet", "release.html"}
    assert kept < set(logged)
    predictions = (built.path / "models" / "parity" / "predictions.parquet").read_bytes()
    assert version.tags["predictions_sha256"] == hashlib.sha256(predictions).hexdigest()
    assert version.tags["report_sha256"] == hashlib.sha256(logged["release.html"]).hexdigest()
    assert f"/runs/{version.run_id}/artifacts/release/release.html" in version.description
    entry = Ledger(built.repository / ".edgeloop").read().entries[-2]
    assert (entry.action, entry.version, entry.run_id) == ("registered", 2, version.run_id)
    assert entry.evidence_sha256 == version.tags["evidence_sha256"]


def test_a_refused_build_is_not_registered(built):
    """The gate's verdict is read again here, and what refused is named: a missing measurement, too."""
    values = {"unit": "", "required": True, "threshold": 0.9, "measured": 0.8, "evidence": "parity.json"}
    checks = [
        {"name": "v: accuracy floor", "verdict": "fail", **values},
        {"name": "v: peak memory", "verdict": "not measured", **values},
        {"name": "v: size", "verdict": "not measured", **values, "required": False},
    ]
    _edit(built.path / "reports" / "gate.json", verdict="fail", checks=checks)
    with pytest.raises(UserError, match=r"v: accuracy floor: 0\.8, threshold 0\.9") as refused:
        register.verify_evidence(built.path)
    assert "v: peak memory: not measured; parity.json" in refused.value.got
    assert "v: size" not in refused.value.got


def test_a_report_is_drawn_again_unless_it_is_of_this_evidence(built):
    """What the build has just drawn is taken; of another verdict, or edited since, it is drawn anew."""
    report = write_report(built.path)
    evidence = read_json(built.path / "reports" / "gate.json")["evidence_sha256"]
    ours = report.read_bytes()
    report.write_text("known by its hash", encoding="utf-8")
    drawn = Drawn.now(report, evidence)
    assert register.release_files(built.path, drawn)["release.html"].read_text() == "known by its hash"
    register.release_files(built.path, Drawn.now(report, "of another verdict"))
    assert report.read_bytes() == ours
    report.write_text("edited", encoding="utf-8")
    register.release_files(built.path, drawn)
    assert report.read_bytes() == ours


def test_a_model_changed_after_the_gate_is_refused(built):
    """The evidence is about other bytes than those that lie there."""
    model = next((built.path / "models" / "mnn").glob("*/model.mnn"))
    model.write_bytes(model.read_bytes() + b"\0")
    with pytest.raises(UserError, match="its card says otherwise"):
        register.verify_evidence(built.path)


def test_a_missing_model_is_refused(built):
    """A variant the convert report speaks of has to be there."""
    next((built.path / "models" / "mnn").glob("*/model.mnn")).unlink()
    with pytest.raises(UserError, match="no file"):
        register.verify_evidence(built.path)


def test_a_variant_without_parity_is_refused(built):
    """Every converted variant needs its parity."""
    (built.path / "reports" / "parity.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"parity\.json says nothing"):
        register.verify_evidence(built.path)


def test_a_long_gate_table_keeps_its_head():
    """MLflow keeps 5,000 characters: whole rows from the top, where what failed stands, and a pointer."""
    rows = [f"| check {number} | 1 | 2 |" for number in range(1000)]
    text = register.description("\n".join(rows))
    assert len(text) <= 5000
    assert text.startswith(rows[0])
    kept = text.split("\n\n")[0].splitlines()
    assert kept == rows[: len(kept)]
    assert "release/gate.md" in text
    assert register.description("short\n") == "short\n"
