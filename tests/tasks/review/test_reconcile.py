"""What people do in MLflow's pages, and what a crash leaves: taken over, put back, or finished."""

import contextlib
import json
import sqlite3
import subprocess
import sys

import pytest
from review_room import MODEL

from fleet.device.errors import UserError
from tasks.champion import read_champion
from tasks.provenance import sha256_of
from tasks.review.ledger import Draft
from tasks.review.reconcile import reconcile, unreconciled
from tasks.tracking import check_store
from tasks.workspace import CODE


def champion_of(room):
    """What the workspace's champion/ says."""
    return json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))


def test_an_approval_by_tag_is_verified_and_taken_over(room):
    """Who and why come from the tags beside it; the version becomes champion as by the command line."""
    room.set_tag(2, reviewed_by="Ada", review_reason="looks right", review_state="approved")
    reconcile(room.workspace)
    approved = next(e for e in room.entries if e.action == "approved")
    assert (approved.version, approved.by, approved.why) == (2, "Ada", "looks right")
    assert approved.by_source == "MLflow tag reviewed_by"
    assert room.aliases["champion"] == 2
    assert room.tags(2)["reviewed_at"] == approved.time
    assert json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))["version"] == 2
    assert not unreconciled(room.workspace)


def test_an_approval_by_tag_without_a_name_is_unknowns(room):
    """MLflow does not say who edits, so neither does the ledger."""
    room.set_tag(2, review_state="approved")
    room.set_tag(1, review_state="rejected")
    reconcile(room.workspace)
    by_action = {e.action: e for e in room.entries}
    for action in ("approved", "rejected"):
        assert by_action[action].by == "unknown, through MLflow"
        assert by_action[action].why.startswith("no reason given")
    assert room.states == {3: "pending", 2: "approved", 1: "rejected"}


def test_an_approval_by_tag_of_a_spoilt_version_is_refused(room):
    """The tag goes to `refused` with the reason beside it, and stays there without being tried again."""
    room.replace(2, "parity.json", b"{}")
    room.set_tag(2, reviewed_by="Ada", review_state="approved")
    reconcile(room.workspace)
    assert room.tags(2)["review_state"] == "refused"
    assert "parity.json" in room.tags(2)["review_refusal"]
    assert "champion" not in room.aliases
    assert (room.entries[-1].action, room.entries[-1].by) == ("refused", "Ada")
    assert not unreconciled(room.workspace)
    assert reconcile(room.workspace) == []


EDITS = {
    "state": {"review_state": "pending"},
    "the other decision": {"review_state": "rejected"},
    "author": {"reviewed_by": "Eve"},
    "reason": {"review_reason": "because"},
    "time": {"reviewed_at": "1999-01-01T00:00:00Z"},
    "evidence": {"evidence_sha256": "0" * 64},
    "release": {"release_sha256": "0" * 64},
    "predictions": {"predictions_sha256": "0" * 64},
}


def test_tags_edited_after_a_decision_are_put_back(room):
    """An approval is withdrawn by the command line only: every other edit is recorded and undone."""
    room.approve(2)
    right = room.tags(2)
    for edit in EDITS.values():
        room.set_tag(2, **edit)
        start = len(room.entries)
        reconcile(room.workspace)
        ((key, value),) = edit.items()
        (entry,) = room.entries[start:]
        assert (entry.action, entry.version) == ("tag_changed", 2)
        assert f"tag {key} was {value!r}" in entry.why
        assert room.tags(2)["review_state"] == "approved"
        assert {k: v for k, v in room.tags(2).items() if k != "review_entry"} == {
            k: v for k, v in right.items() if k != "review_entry"
        }
    assert room.aliases["champion"] == 2


def test_a_champion_set_by_hand_has_to_be_approved(room):
    """An alias is not an approval: it is put back, to no version before the first release."""
    room.client.set_registered_model_alias(MODEL, "champion", "3")
    room.client.set_registered_model_alias(MODEL, "previous", "1")
    reconcile(room.workspace)
    assert room.aliases == {"candidate": 3}
    assert [(e.action, e.alias) for e in room.entries[-2:]] == [
        ("tag_changed", "champion"),
        ("tag_changed", "previous"),
    ]
    assert read_champion(room.path / "champion") is None


def test_a_champion_moved_by_hand_to_an_approved_version_is_taken_over(room):
    """It was verified once and is verified again; the workspace follows."""
    room.approve(1)
    room.approve(2)
    room.client.set_registered_model_alias(MODEL, "champion", "1")
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    assert (room.aliases["champion"], room.aliases["previous"]) == (1, 2)
    moved = next(e for e in reversed(room.entries) if (e.alias, e.version) == ("champion", 1))
    assert moved.by == "unknown, through MLflow"
    assert moved.evidence_sha256 == room.tags(1)["evidence_sha256"]
    assert json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))["version"] == 1


def test_a_champion_alias_taken_away_by_hand_comes_back(room):
    """A champion is withdrawn by rejecting it, with a reason."""
    room.approve(2)
    room.client.delete_registered_model_alias(MODEL, "champion")
    reconcile(room.workspace)
    assert room.aliases["champion"] == 2
    assert "champion was gone in MLflow" in room.entries[-1].why


def test_a_champion_deleted_in_mlflow_falls_back(room):
    """The version before it follows; the ledger says what is gone and who became champion."""
    room.approve(1)
    room.approve(2)
    room.client.delete_model_version(MODEL, "2")
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    assert room.aliases == {"champion": 1, "candidate": 3}
    assert ("deleted", "", 2) in room.said()
    assert json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))["version"] == 1
    assert room.states == {3: "pending", 1: "approved"}


@pytest.mark.parametrize("order", [("1", "2"), ("2", "1")])
def test_champion_and_previous_deleted_leave_no_champion(room, order):
    """No heir is left: said in the ledger, and neither builds nor lists stop at it."""
    for version in order:
        room.approve(int(version))
    for version in order:
        room.client.delete_model_version(MODEL, version)
    reconcile(room.workspace)
    assert {("deleted", "", 1), ("deleted", "", 2)} <= set(room.said())
    assert room.aliases == {"candidate": 3}
    assert json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8")) == {}
    assert not unreconciled(room.workspace)


def test_a_model_deleted_and_registered_anew_inherits_nothing(room):
    """Version numbers begin again at 1; what was approved under a number is not the new version's."""
    room.approve(1)
    room.client.delete_registered_model(MODEL)
    room.client.create_registered_model(MODEL)
    run = room.client.search_runs([room.client.get_experiment_by_name(MODEL).experiment_id])[0].info.run_id
    room.client.create_model_version(MODEL, "file:///elsewhere", run_id=run)
    before = (room.ledger.path.read_bytes(), champion_of(room))
    with pytest.raises(UserError, match="never seen this ledger, which has version 1, 2, 3"):
        _ = room.states
    assert (room.ledger.path.read_bytes(), champion_of(room)) == before
    room.ledger.path.rename(room.path / "ledger.old")  # what the error advises
    assert room.states == {1: "pending"}
    assert room.aliases == {}
    assert "review_state" in room.tags(1)
    assert champion_of(room)["version"] == 1


@pytest.mark.parametrize("store", ["another", "empty", "gone"])
def test_a_store_that_never_saw_the_ledger_takes_no_champion_away(room, monkeypatch, store):
    """Read with another store, or without one: versions that are not there were not deleted there."""
    room.approve(1)
    before = (room.ledger.path.read_bytes(), champion_of(room))
    other = room.path / "other.db"
    if store != "gone":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{other}")
    if store == "another":
        with contextlib.closing(sqlite3.connect(other)) as database:
            database.execute("create table x(a)")
    if store == "gone":
        (room.repository / ".edgeloop" / "mlflow.db").rename(other)
    assert unreconciled(room.workspace)
    for read in (lambda: reconcile(room.workspace), lambda: room.states):
        with pytest.raises(UserError, match="never seen this ledger, which has version 1, 2, 3"):
            read()
    assert (room.ledger.path.read_bytes(), champion_of(room)) == before


def test_a_writer_killed_in_the_middle_locks_nobody_out(room):
    """SQLite's journal stays: whoever reads next rolls it back, and the decisions are there."""
    room.approve(1)
    database = room.repository / ".edgeloop" / "mlflow.db"
    code = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('pragma cache_size=1')\n"
        "c.execute('begin immediate')\n"
        "for t in ('update model_version_tags set value = value || 1',"
        " 'create table zz as select * from metrics',"
        " 'update params set value = value || 1', 'update tags set value = value || 1'): c.execute(t)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(database)], check=False)
    assert database.with_name("mlflow.db-journal").stat().st_size > 0
    check_store(f"sqlite:///{database}")
    assert not unreconciled(room.workspace)
    assert room.states[1] == "approved"


CUT_SHORT = {
    "before the alias moved": [("approved", "")],
    "before MLflow was told": [("approved", ""), ("alias", "champion")],
}


@pytest.mark.parametrize("written", CUT_SHORT.values(), ids=CUT_SHORT)
def test_a_decision_cut_short_is_finished(room, written):
    """The ledger has it, MLflow has not: the next command finishes it and blames nobody for that."""
    made = next(e for e in room.entries if (e.action, e.version) == ("registered", 2))
    common = {"name": MODEL, "version": 2, "by": "Ada", "why": "good", "run_id": made.run_id}
    hashes = {"evidence_sha256": made.evidence_sha256, "release_sha256": made.release_sha256}
    room.ledger.append([Draft(action=a, alias=alias, **common, **hashes) for a, alias in written])
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    assert (room.tags(2)["review_state"], room.tags(2)["reviewed_by"]) == ("approved", "Ada")
    assert room.aliases["champion"] == 2
    assert [e.action for e in room.entries].count("approved") == 1
    assert "tag_changed" not in [e.action for e in room.entries]
    assert json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))["version"] == 2
    assert not unreconciled(room.workspace)


def test_a_rejection_in_mlflow_outlives_an_approval_that_was_cut_short(room):
    """Who set the tag was not shown the approval: of two reviewers who disagree the rejection wins."""
    made = next(e for e in room.entries if (e.action, e.version) == ("registered", 2))
    room.ledger.append([Draft(action="approved", name=MODEL, version=2, by="Ada", run_id=made.run_id)])
    room.set_tag(2, review_state="rejected")
    reconcile(room.workspace)
    assert room.states[2] == "rejected"
    assert "champion" not in room.aliases


def test_of_another_ledger_only_rejections_are_taken_over(room, copy_room):
    """Without its ledger a repository knows no registration: nothing is approved until it is built here."""
    room.approve(2, "good")
    room.reject(1, "bad")
    other = copy_room(room, "other")
    other.ledger.path.unlink()
    assert other.states == {3: "pending", 2: "refused", 1: "rejected"}
    assert "champion" not in other.aliases
    taken_over = [e for e in other.entries if e.action in ("approved", "rejected")]
    assert {(e.action, e.version, e.by, e.why) for e in taken_over} == {
        ("rejected", 1, "Ada", "bad"),
    }
    other.ledger_registers(2)  # as a build does
    other.approve(2)
    assert other.aliases["champion"] == 2


def test_a_ledger_that_lost_its_end_is_found_out(room):
    """MLflow was told of the last entry: cutting it off does not undo a decision."""
    room.approve(2)
    lines = room.ledger.path.read_bytes().splitlines(keepends=True)
    room.ledger.path.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(UserError, match="is missing or another one: MLflow was told of it"):
        reconcile(room.workspace)


def test_whether_there_is_something_to_do_is_known_without_mlflow(room):
    """`edgeloop build` asks each time, so the question must not cost MLflow's import."""
    reconcile(room.workspace)
    asked = (
        "import sys; from pathlib import Path; from tasks.workspace import Workspace\n"
        "from tasks.review.reconcile import unreconciled\n"
        f"w = Workspace(name='tiny', path=Path({str(room.path)!r}), repository=Path())\n"
        "print(unreconciled(w), 'mlflow' in sys.modules)"
    )

    def answer() -> str:
        command = [sys.executable, "-c", asked]
        return subprocess.run(command, cwd=CODE, check=True, capture_output=True, text=True).stdout.strip()

    assert answer() == "False False"
    room.set_tag(3, review_state="approved")
    assert answer() == "True False"


def test_a_champion_folder_that_went_missing_is_written_again(room):
    """It is what builds are held against: the ledger's champion, whatever git or somebody left there."""
    room.approve(2)
    (room.path / "champion" / "champion.json").write_text("{}", encoding="utf-8")
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    assert json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))["version"] == 2


@pytest.mark.parametrize(
    "edited", [{"variants": {}}, {"labels": [str(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 0)]}]
)
def test_an_edited_champion_record_is_written_again(room, edited):
    """It decides what builds are compared with: the ledger has its hash since the approval."""
    room.approve(2)
    path = room.path / "champion" / "champion.json"
    right = path.read_bytes()
    path.write_text(json.dumps(json.loads(right) | edited), encoding="utf-8")
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    assert path.read_bytes() == right
    assert not unreconciled(room.workspace)


def test_other_predictions_named_by_the_record_are_written_again(room):
    """Also of an approval that kept no hash of the record: the registration knows the predictions."""
    made = next(e for e in room.entries if (e.action, e.version) == ("registered", 2))
    common = {"name": MODEL, "version": 2, "run_id": made.run_id, "evidence_sha256": made.evidence_sha256}
    room.ledger.append(
        [Draft(action="approved", **common), Draft(action="alias", alias="champion", **common)]
    )
    reconcile(room.workspace)
    folder = room.path / "champion"
    right = (folder / "champion.json").read_bytes()
    (folder / "predictions.parquet").write_bytes(b"other")
    record = json.loads(right) | {"predictions_sha256": sha256_of(folder / "predictions.parquet")}
    (folder / "champion.json").write_text(json.dumps(record), encoding="utf-8")
    assert unreconciled(room.workspace)
    reconcile(room.workspace)
    assert (folder / "champion.json").read_bytes() == right
    assert sha256_of(folder / "predictions.parquet") == json.loads(right)["predictions_sha256"]


def test_origin_tags_of_a_waiting_version_are_put_back(room):
    """The reviewer reads them: what the build said is in the ledger."""
    right = room.tags(3)
    forged = dict.fromkeys(("git_commit", "build_id", "data_digest", "engine_version", "variants"), "forged")
    room.set_tag(3, **forged)
    start = len(room.entries)
    reconcile(room.workspace)
    put_back = {k for k in forged if right[k]}
    assert {"build_id", "data_digest", "engine_version", "variants"} <= put_back
    assert {k: room.tags(3)[k] for k in put_back} == {k: right[k] for k in put_back}
    assert [e.action for e in room.entries[start:]] == ["tag_changed"] * len(put_back)


@pytest.mark.parametrize("kept", [0, 300])
def test_a_ledger_without_a_whole_line_is_not_a_new_one(room, kept):
    """MLflow was told of the lines that are gone; a repository without a ledger is another thing."""
    room.approve(2)
    before = room.ledger.path.read_bytes()[:kept]
    room.ledger.path.write_bytes(before)
    with pytest.raises(UserError, match="line 1 is missing or cut short: MLflow was told of ledger"):
        reconcile(room.workspace)
    assert room.ledger.path.read_bytes() == before


def test_a_champion_that_git_brought_stays_while_the_ledger_has_none(room):
    """A fresh clone has a champion and no ledger yet: builds in it are held against that champion."""
    record = room.path / "champion" / "champion.json"
    record.write_text('{"name": "edgeloop-tiny", "version": 7}', encoding="utf-8")
    reconcile(room.workspace)
    assert json.loads(record.read_text(encoding="utf-8"))["version"] == 7


def test_versions_that_wait_are_found_by_their_state(room):
    """The filters that MLflow's pages and API take, on versions and on models."""
    room.approve(2)

    def versions(state: str) -> list[int]:
        found = room.client.search_model_versions(f"name = '{MODEL}' and tags.review_state = '{state}'")
        return sorted(int(version.version) for version in found)

    assert (versions("pending"), versions("approved")) == ([1, 3], [2])
    found = room.client.search_registered_models("tags.review_state = 'pending'")
    assert [model.name for model in found] == [MODEL]
    for version in (1, 3):
        room.reject(version)
    assert room.client.search_registered_models("tags.review_state = 'pending'") == []
