"""Approving and rejecting: what is verified, what is recorded, what MLflow and the workspace show after."""

import hashlib
import json
import subprocess
import sys

import pytest
from review_room import ADA, MODEL, Room

from fleet.device.errors import UserError
from tasks.champion import read_champion
from tasks.judge.evidence import evidence_sha256
from tasks.review import acts
from tasks.review.author import Author, author, checked_text
from tasks.review.ledger import Draft
from tasks.review.reconcile import reconcile

BOB = Author(name="Bob", source="--by")


def test_an_approved_version_becomes_champion(room):
    """Tags and alias in MLflow, a line each in the ledger, and champion/ as the gate reads it."""
    start = len(room.entries)
    room.approve(2, "fast enough")
    tags, evidence = room.tags(2), room.tags(2)["evidence_sha256"]
    approved, champion = room.entries[start:]
    assert (approved.action, approved.by, approved.why) == ("approved", "Ada", "fast enough")
    assert (champion.action, champion.alias, champion.version) == ("alias", "champion", 2)
    assert approved.evidence_sha256 == champion.evidence_sha256 == evidence
    assert (tags["review_state"], tags["reviewed_by"]) == ("approved", "Ada")
    assert (tags["reviewed_at"], tags["review_reason"]) == (approved.time, "fast enough")
    assert room.aliases == {"champion": 2, "candidate": 3}
    record = json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))
    assert (record["name"], record["version"], record["evidence_sha256"]) == (MODEL, 2, evidence)
    assert record["labels"] == [str(digit) for digit in range(10)]
    parity = json.loads((room.path / "reports" / "parity.json").read_text(encoding="utf-8"))
    for name, variant in record["variants"].items():
        model = (room.path / "models" / "mnn" / name / "model.mnn").read_bytes()
        assert variant == {
            "mnn_sha256": hashlib.sha256(model).hexdigest(),
            "size_bytes": len(model),
            "top1": parity[f"{name}/top1"],
        }
    predictions = (room.path / "champion" / "predictions.parquet").read_bytes()
    assert predictions == (room.path / "models" / "parity" / "predictions.parquet").read_bytes()
    assert record["predictions_sha256"] == hashlib.sha256(predictions).hexdigest()


def test_the_next_champion_keeps_the_one_before(room):
    """`previous` is who falls back; the candidate that was approved is none any more."""
    room.approve(2)
    room.approve(3)
    assert room.aliases == {"champion": 3, "previous": 2}
    assert room.said()[-3:] == [
        ("alias", "champion", 3),
        ("alias", "previous", 2),
        ("alias", "candidate", None),
    ]


def test_an_older_version_may_become_champion_again(room):
    """Going back is a decision as any other: verified, with its reason, and the newer one is `previous`."""
    room.approve(3)
    room.approve(1, "3 is slow in the field")
    assert room.aliases == {"champion": 1, "previous": 3}
    room.approve(3, "found out why")
    assert room.aliases == {"champion": 3, "previous": 1}


def _changed_model(room: Room) -> None:
    path = next(room.artifact(3, "models").glob("*/model.mnn"))
    room.replace(3, f"models/{path.parent.name}/model.mnn", path.read_bytes() + b"\0")


def _missing_card(room: Room) -> None:
    path = next(room.artifact(3, "models").glob("*/card.json"))
    room.replace(3, f"models/{path.parent.name}/card.json", None)


def _added_model(room: Room) -> None:
    folder = room.artifact(3, "models") / "mbv3s-p90-i8-r32"
    folder.mkdir()
    (folder / "model.mnn").write_bytes(b"x")


def _edited_gate(room: Room, **values) -> None:
    gate = json.loads(room.artifact(3, "gate.json").read_text(encoding="utf-8"))
    room.replace(3, "gate.json", json.dumps(gate | values).encode())


def _judged_anew(room: Room, **values) -> None:
    """Somebody who knows how the report is hashed hashes it again."""
    gate = json.loads(room.artifact(3, "gate.json").read_text(encoding="utf-8")) | values
    room.replace(3, "gate.json", json.dumps(gate | {"evidence_sha256": evidence_sha256(gate)}).encode())


def _hashed_again(room: Room) -> None:
    _judged_anew(room, comparison={"v": {}})
    gate = json.loads(room.artifact(3, "gate.json").read_text(encoding="utf-8"))
    room.set_tag(3, evidence_sha256=gate["evidence_sha256"])


def _failed_gate(room: Room) -> None:
    _edited_gate(room, verdict="fail")


def _failed_check(room: Room) -> None:
    gate = json.loads(room.artifact(3, "gate.json").read_text(encoding="utf-8"))
    gate["checks"][0] |= {"verdict": "fail", "name": "v: accuracy floor"}
    _edited_gate(room, checks=gate["checks"])


def _eased_threshold(room: Room) -> None:
    gate = json.loads(room.artifact(3, "gate.json").read_text(encoding="utf-8"))
    gate["checks"][0]["threshold"] = 0.0
    _edited_gate(room, checks=gate["checks"])


def _other_evidence_altogether(room: Room) -> None:
    """A gate report that is right in itself, of another judgement."""
    room.replace(3, "gate.json", room.artifact(2, "gate.json").read_bytes())


def _outside_file(room: Room) -> None:
    _edited_gate(room, evidence={"reports/../../../../../../etc/passwd": "0" * 64})


def _deleted_run(room: Room) -> None:
    room.client.delete_run(room.client.get_model_version(MODEL, "3").run_id)


SPOILT = {
    "a model changed": (_changed_model, r"model\.mnn is \w+, the gate judged"),
    "a card missing": (_missing_card, r"card\.json is missing"),
    "a model added": (_added_model, "release_sha256 is"),
    "the predictions missing": (
        lambda room: room.replace(3, "predictions.parquet", None),
        r"predictions\.parquet is missing",
    ),
    "the predictions changed": (
        lambda room: room.replace(3, "predictions.parquet", b"x"),
        r"predictions\.parquet is \w+, the gate judged",
    ),
    "a report changed": (
        lambda room: room.replace(3, "parity.json", b"{}"),
        r"parity\.json is \w+, the gate",
    ),
    "no gate report": (lambda room: room.replace(3, "gate.json", None), r"gate\.json is missing"),
    "a gate report that is none": (lambda room: room.replace(3, "gate.json", b"[]"), "cannot be read"),
    "a failed gate": (_failed_gate, "the gate refused it: fail"),
    "a failed check": (_failed_check, "the gate refused it: v: accuracy floor"),
    "a threshold eased": (_eased_threshold, "its hash is another one"),
    "hashed again, tag and all": (_hashed_again, "evidence_sha256 is"),
    "the report changed": (lambda room: room.replace(3, "release.html", b"all is well"), "report_sha256 is"),
    "the gate's table changed": (
        lambda room: room.replace(3, "gate.md", b"all is well"),
        "gate_table_sha256 is",
    ),
    "the params changed": (lambda room: room.replace(3, "params.yaml", b"{}"), "params_sha256 is"),
    "dvc.lock changed": (lambda room: room.replace(3, "dvc.lock", b"{}"), "dvc_lock_sha256 is"),
    "a file more": (
        lambda room: room.artifact(3, "README.exe").write_bytes(b"MZ"),
        r"nobody vouches for artifact release/README\.exe",
    ),
    "another evidence": (_other_evidence_altogether, "evidence_sha256 is"),
    "evidence outside": (_outside_file, "names the file"),
    "the run deleted": (_deleted_run, "its run .* was deleted"),
    "the tag gate edited": (lambda room: room.set_tag(3, gate="fail"), "its tag gate is 'fail'"),
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILT.values(), ids=SPOILT)
def test_what_is_not_as_it_was_registered_is_not_approved(room, spoil, reason):
    """One error with the reason; it is in the ledger and in a tag, and nobody became champion."""
    spoil(room)
    with pytest.raises(UserError, match=reason) as raised:
        room.approve(3)
    refused = room.entries[-1]
    assert (refused.action, refused.version, refused.by) == ("refused", 3, "Ada")
    assert refused.why == raised.value.got
    assert room.tags(3)["review_state"] == "refused"
    assert room.tags(3)["review_refusal"] == refused.why
    assert "champion" not in room.aliases
    assert read_champion(room.path / "champion") is None


def test_a_refused_version_may_be_approved_when_it_is_whole_again(room):
    """Each approval is verified anew; the refusal goes from the tags and stays in the ledger."""
    whole = room.artifact(3, "parity.json").read_bytes()
    room.replace(3, "parity.json", b"{}")
    with pytest.raises(UserError):
        room.approve(3)
    room.replace(3, "parity.json", whole)
    room.approve(3)
    assert room.tags(3)["review_state"] == "approved"
    assert "review_refusal" not in room.tags(3)
    assert ("refused", "", 3) in room.said()


@pytest.mark.parametrize("decision", ["approved", "rejected"])
@pytest.mark.parametrize(
    ("name", "version", "reason"),
    [("edgeloop-tiny", 99, "has no version 99"), ("edgeloop-tin", 1, "model 'edgeloop-tin'")],
    ids=["version", "name"],
)
def test_what_is_not_there_is_refused_by_name(room, decision, name, version, reason):
    """The attempt is in the ledger, and no version comes of it."""
    with pytest.raises(UserError, match=reason):
        acts.act(room.repository, decision, name, version, who=ADA, why="good")
    last = room.entries[-1]
    assert (last.action, last.name, last.version) == ("refused", name, version)
    assert room.states == {3: "pending", 2: "pending", 1: "pending"}
    assert reconcile(room.workspace) == []


def test_approving_the_champion_again_changes_nothing(room):
    """The second approval says who was first."""
    room.approve(2)
    with pytest.raises(UserError, match="champion already; approved by Ada"):
        room.approve(2, who=BOB)
    assert room.tags(2)["reviewed_by"] == "Ada"
    assert room.states[2] == "approved"


def test_a_rejection_stays(room):
    """Whoever approves later is told who rejected it and why: build again, or register anew."""
    room.reject(3, "wrong on sevens")
    assert room.aliases == {}
    with pytest.raises(UserError, match=r"rejected by Ada at .*: wrong on sevens"):
        room.approve(3, who=BOB)
    with pytest.raises(UserError, match="was rejected"):
        room.reject(3, who=BOB)
    assert room.states[3] == "rejected"
    assert room.tags(3)["reviewed_by"] == "Ada"


def test_a_version_without_a_run_can_still_be_rejected(room):
    """Rejecting needs no artifacts."""
    _deleted_run(room)
    room.reject(3, "its run is gone")
    assert room.states[3] == "rejected"


def test_a_withdrawn_champion_falls_back_to_the_one_before(room):
    """And that one to the one before it; the last one withdrawn leaves none."""
    for version in (1, 2, 3):
        room.approve(version)
    room.reject(3, "crashes")
    assert room.aliases == {"champion": 2, "previous": 1}
    moved = next(e for e in room.entries if (e.action, e.version) == ("alias", 2) and e.why == "crashes")
    assert moved.evidence_sha256 == room.tags(2)["evidence_sha256"]
    record = json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8"))
    assert record["version"] == 2
    room.reject(2)
    assert room.aliases == {"champion": 1}
    room.reject(1)
    assert room.aliases == {}
    assert json.loads((room.path / "champion" / "champion.json").read_text(encoding="utf-8")) == {}
    assert not (room.path / "champion" / "predictions.parquet").exists()


def test_a_spoilt_predecessor_is_passed_over(room):
    """Falling back is verified as approving is: the next whole one becomes champion, the ledger says why."""
    for version in (1, 2, 3):
        room.approve(version)
    room.replace(2, "parity.json", b"{}")
    room.reject(3)
    assert room.aliases["champion"] == 1
    assert any(e.action == "refused" and e.version == 2 and "parity.json" in e.why for e in room.entries)


def test_rejecting_the_previous_one_leaves_the_champion(room):
    """Only its own alias goes, to the champion before it."""
    for version in (1, 2, 3):
        room.approve(version)
    room.reject(2)
    assert room.aliases == {"champion": 3, "previous": 1}


def _edgeloop(room: Room, *arguments: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "flows", "release", *arguments],
        cwd=room.repository,
        env=room.environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _standing(room: Room) -> tuple[dict[int, str], dict[str, int]]:
    return room.states, room.aliases


def test_two_reviewers_at_once(room, copy_room):
    """Two processes: who rejects wins over who approves, and of two approved ones the later is champion."""
    contrary = copy_room(room, "contrary")
    both = [
        _edgeloop(contrary, "approve", MODEL, "2", "--why", "good", "--by", "Ada"),
        _edgeloop(contrary, "reject", MODEL, "2", "--why", "bad", "--by", "Bob"),
        _edgeloop(room, "approve", MODEL, "2", "--why", "good", "--by", "Ada"),
        _edgeloop(room, "approve", MODEL, "3", "--why", "better", "--by", "Bob"),
    ]
    for process in both:
        _, said = process.communicate()
        assert process.returncode in (0, 2), said
        assert "Traceback" not in said
    assert contrary.states[2] == "rejected"
    assert "champion" not in contrary.aliases
    approved = [e.version for e in room.entries if e.action == "approved"]
    assert sorted(approved) == [2, 3]
    assert room.aliases == {"champion": approved[1], "previous": approved[0]}
    assert room.states == {3: "approved", 2: "approved", 1: "pending"}


def test_a_server_that_is_down_loses_no_decision(room):
    """One error says where the decision is kept; it is carried out when MLflow answers again."""
    down = _edgeloop(
        room, "approve", MODEL, "2", "--why", "good", "--by", "Ada", MLFLOW_TRACKING_URI="http://127.0.0.1:9"
    )
    _, said = down.communicate()
    assert down.returncode == 2, said
    assert said.count("edgeloop:") == 1
    assert f"kept as entry {len(room.entries)}" in said
    assert (room.entries[-1].action, room.entries[-1].decision) == ("asked", "approved")
    assert room.states[2] == "approved"
    assert room.aliases["champion"] == 2
    assert [(e.by, e.why) for e in room.entries if e.action == "approved"] == [("Ada", "good")]


def test_a_kept_decision_on_a_spoilt_version_is_refused_later(room):
    """Nothing is approved unverified; and a refused one is not tried again and again."""
    room.ledger.append(
        [Draft(action="asked", name=MODEL, version=3, by="Ada", why="ok", decision="approved")]
    )
    room.replace(3, "parity.json", b"{}")
    assert room.states[3] == "refused"
    assert reconcile(room.workspace) == []


def test_a_disk_without_room_refuses_nothing(room):
    """The artifacts do not fit: an error that says so, and the version waits as before."""
    command = f"ulimit -f 2000; exec {sys.executable} -m flows release approve {MODEL} 3 --why good"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=room.repository,
        env=room.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "no room" in done.stderr
    assert "refused" not in [e.action for e in room.entries]
    assert room.states[3] == "pending"


def test_the_author_is_said_with_how_it_was_found_out(tmp_path, monkeypatch):
    """--by, else git's user, else the system's."""
    assert author(tmp_path, " Ada ") == Author(name="Ada", source="--by")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(tmp_path / "none"))
    (tmp_path / "gitconfig").write_text("[user]\nname = Bob\nemail = bob@example.org\n", encoding="utf-8")
    assert author(tmp_path, None) == Author(name="Bob <bob@example.org>", source="git config")
    (tmp_path / "gitconfig").write_bytes(b"[user]\nname = J\xf6rg\n")  # Latin-1
    assert author(tmp_path, None) == Author(name="J\ufffdrg", source="git config")
    (tmp_path / "gitconfig").write_text("", encoding="utf-8")
    monkeypatch.setenv("LOGNAME", "cleo")
    assert author(tmp_path, None) == Author(name="cleo", source="operating system")


@pytest.mark.parametrize("text", ["", "  \n", "x" * 4001, "\x1b[2Jgone", "\udcff"], ids=repr)
def test_a_reason_has_to_be_text(text):
    """Empty, endless, or made for a terminal: refused before anything is decided."""
    with pytest.raises(UserError, match="--why"):
        checked_text("--why", text)
