"""What somebody who can write to MLflow, and to nothing else, tries: no forged release is approved."""

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from review_room import MODEL, Room

from fleet.device.errors import UserError
from tasks.judge.evidence import evidence_sha256
from tasks.provenance import release_sha256
from tasks.review.reconcile import reconcile, unreconciled
from tasks.review.release import ATTACHED


def _register_by_hand(room: Room, folder: Path, tags: dict[str, str]) -> int:
    """A version that no build made, of the files in `folder`, its tags those of version 1 otherwise."""
    client = room.client
    experiment = client.get_experiment_by_name(MODEL).experiment_id
    run = client.create_run(experiment)
    client.log_artifacts(run.info.run_id, str(folder), "release")
    tags = room.tags(1) | {"review_state": "pending"} | tags
    source = f"{run.info.artifact_uri}/release"
    made = client.create_model_version(MODEL, source, run_id=run.info.run_id, tags=tags)
    return int(made.version)


def _forged(room: Room, tmp_path: Path) -> int:
    """Version 1's files with another model, judged and hashed to match."""
    folder = tmp_path / "forged"
    shutil.copytree(room.artifact(1, ""), folder)
    model = next(folder.glob("models/*i8*/model.mnn"))
    model.write_bytes(b"sixteen bytes...")
    gate = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
    named = f"models/mnn/{model.parent.name}/model.mnn"
    gate["evidence"][named] = hashlib.sha256(model.read_bytes()).hexdigest()
    gate["evidence_sha256"] = evidence_sha256(gate)
    (folder / "gate.json").write_text(json.dumps(gate), encoding="utf-8")
    tags = {
        "evidence_sha256": gate["evidence_sha256"],
        "release_sha256": release_sha256(folder / "models"),
    }
    return _register_by_hand(room, folder, tags)


@pytest.mark.parametrize("way", ["command", "tag"])
def test_a_version_that_no_build_registered_is_refused(room, tmp_path, way):
    """Artifacts, hashes and tags that agree with each other are no registration; the champion stays."""
    room.approve(1)
    version = _forged(room, tmp_path)
    if way == "command":
        with pytest.raises(UserError, match="was registered by no build that this ledger knows") as raised:
            room.approve(version)
        assert "edgeloop build" in raised.value.next_step
    else:
        room.set_tag(version, review_state="approved")
        room.client.set_registered_model_alias(MODEL, "champion", str(version))
    assert room.states[version] == "refused"
    assert room.aliases["champion"] == 1
    assert "registered by no build" in room.tags(version)["review_refusal"]


def _judged_nothing(room: Room, tmp_path: Path) -> int:
    folder = tmp_path / "nothing"
    folder.mkdir()
    gate = {"verdict": "pass", "evidence": {}, "checks": [], "comparison": {}}
    gate["evidence_sha256"] = evidence_sha256(gate)
    for name in ATTACHED.values():
        shutil.copy2(room.artifact(1, name), folder / name)
    (folder / "gate.json").write_text(json.dumps(gate), encoding="utf-8")
    tags = {
        "evidence_sha256": gate["evidence_sha256"],
        "release_sha256": hashlib.sha256(b"").hexdigest(),
    }
    return _register_by_hand(room, folder, tags)


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "in the ledger"])
def test_a_version_without_models_stops_nobody(room, tmp_path, known):
    """It is refused before the ledger has an approval that nothing could be made of; the rest goes on."""
    version = _judged_nothing(room, tmp_path)
    if known:
        room.ledger_registers(version)
    room.set_tag(version, review_state="approved")
    assert room.states == {4: "refused", 3: "pending", 2: "pending", 1: "pending"}
    assert ("approved", "", version) not in room.said()
    with pytest.raises(UserError, match="judged no check" if known else "by no build"):
        room.approve(version)
    room.approve(1)
    assert room.aliases["champion"] == 1


def test_a_card_that_names_another_model_is_refused(room, tmp_path):
    """Even a registered version: the card is what a device is told of its model."""
    version = _forged(room, tmp_path)
    room.ledger_registers(version)
    with pytest.raises(UserError, match=r"the card of .*i8.* names the model"):
        room.approve(version)


def test_a_version_that_leads_elsewhere_is_refused(room):
    """Verified would be the run's files, resolved those of the source."""
    one = room.client.get_model_version(MODEL, "1")
    made = room.client.create_model_version(MODEL, "file:///evil", run_id=one.run_id, tags=room.tags(1))
    room.ledger_registers(int(made.version))
    with pytest.raises(UserError, match="it leads to file:///evil, its run keeps the release in"):
        room.approve(int(made.version))
    assert "champion" not in room.aliases


@pytest.mark.parametrize("column", ["source", "storage_location"])
def test_a_champion_made_to_lead_elsewhere_is_rejected(room, column):
    """The next command finds it, without MLflow too, and the one before is champion again."""
    room.approve(1)
    room.approve(2)
    assert not unreconciled(room.workspace)
    with sqlite3.connect(room.repository / ".edgeloop" / "mlflow.db") as connection:
        connection.execute(f"update model_versions set {column} = 'file:///evil' where version = 2")
    connection.close()
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    assert room.aliases == {"champion": 1, "candidate": 3}
    assert room.states[2] == "rejected"
    (rejected,) = [e for e in room.entries if e.action == "rejected"]
    assert (rejected.version, rejected.by) == (2, "edgeloop")
    assert "it leads to file:///evil" in rejected.why
    assert not unreconciled(room.workspace)


def test_a_damaged_champion_can_be_rejected(room, capsys):
    """Nobody is locked out: list names the trouble, a build is not judged, and a rejection mends it."""
    room.approve(1)
    room.approve(2)
    (room.path / "champion" / "champion.json").write_text("{}", encoding="utf-8")
    name = next(room.artifact(2, "models").glob("*/model.mnn")).parent.name
    path = room.artifact(2, f"models/{name}/model.mnn")
    room.replace(2, f"models/{name}/model.mnn", path.read_bytes() + b"\0")
    assert room.states == {3: "pending", 2: "approved", 1: "approved"}
    said = capsys.readouterr().err
    assert "champion/ is not the champion's, and cannot be written again" in said
    assert f"edgeloop release reject {MODEL} 2" in said
    with pytest.raises(UserError, match="cannot be written again"):
        reconcile(room.workspace)
    room.reject(2, "damaged")
    assert room.aliases["champion"] == 1
    record = json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))
    assert record["version"] == 1
    assert not unreconciled(room.workspace)
