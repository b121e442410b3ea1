"""`edgeloop release` as programs and people read it."""

import json
import os

import pytest
from review_room import MODEL

from flows.cli import main
from flows.review import catch_up


@pytest.fixture
def run(room, monkeypatch, capsys):
    monkeypatch.chdir(room.repository)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["release", *arguments])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return command


def test_versions_are_listed_shown_and_decided(room, run):
    """JSON with the state, hashes and aliases of each version; the history of one from the ledger."""
    assert run("approve", "tiny", "2", "--why", "good", "--by", "Ada")[0] == 0
    code, out, _ = run("list", "--json")
    listed = {row["version"]: row for row in json.loads(out)}
    assert code == 0
    assert {version: row["state"] for version, row in listed.items()} == {
        1: "pending",
        2: "approved",
        3: "pending",
    }
    assert (listed[2]["aliases"], listed[2]["reviewed_by"], listed[2]["why"]) == (["champion"], "Ada", "good")
    assert [row["version"] for row in json.loads(run("list", "--json", "--state", "approved")[1])] == [2]
    shown = json.loads(run("show", MODEL, "2", "--json")[1])
    assert "**Gate: pass**" in shown["description"]
    assert [entry["action"] for entry in shown["history"]] == ["registered", "alias", "approved", "alias"]
    assert shown["artifacts"] == str(room.artifact(2, ""))
    text = run("show", MODEL, "2")[1]
    assert f"evidence   {listed[2]['evidence_sha256']}" in text
    assert "approved, Ada (--by): good" in text


def test_an_approval_says_what_comes_next(room, run):
    """The champion's folder has to be committed: builds are judged against it. A rejection changes none."""
    code, out, _ = run("approve", "tiny", "2", "--why", "good")
    folder = os.path.relpath(room.workspace.path / "champion", room.repository)
    assert (code, out.splitlines()[-2]) == (0, "aliases: champion")
    assert out.splitlines()[-1] == f"next: commit {folder}; the next build is judged once more, against it"
    assert "next:" not in run("reject", "tiny", "3", "--why", "bad")[1]


def test_a_decision_without_a_reason_names_the_option(room, run):
    """Nothing is decided without `--why`, and the refusal says what to type."""
    for command in ("approve", "reject"):
        code, _, err = run(command, "tiny", "2")
        assert code == 2
        assert "--why TEXT is required" in err
    assert json.loads(run("list", "--json", "--state", "pending")[1])


def test_what_others_wrote_does_not_steer_the_terminal(room, run):
    """Escapes and line breaks in a reason or a name asked for are blanks; the description is not read."""
    room.client.update_model_version(MODEL, "3", "first\x1b[2J\nsecond\x9b3m")
    room.set_tag(3, review_reason="b\x1b]0;title\x07\n  evidence   forged", review_state="rejected")
    code, out, _ = run("show", MODEL, "3")
    assert code == 0
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    assert "first" not in out
    assert "Gate: pass" in out
    assert "b ]0;title    evidence   forged" in out
    (rejected,) = [row for row in json.loads(run("list", "--json")[1]) if row["version"] == 3]
    assert rejected["why"] == "b\x1b]0;title\x07\n  evidence   forged"
    code, _, err = run("show", "x\x1b[2Jy", "3")
    assert code == 2
    assert "\x1b" not in err


def test_a_gate_table_that_was_changed_is_not_shown(room, run):
    """The reviewer reads what the gate wrote, or that it is not there."""
    room.replace(3, "gate.md", b"**Gate: pass** (all is well)")
    code, out, _ = run("show", MODEL, "3")
    assert code == 0
    assert "all is well" not in out
    assert "not shown, since it cannot be verified" in out


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.lock"])
def test_a_folder_where_a_file_of_the_ledger_belongs(room, run, name):
    """One error that names it."""
    path = room.repository / ".edgeloop" / name
    path.unlink(missing_ok=True)
    path.mkdir()
    for command in (["list"], ["approve", MODEL, "2", "--why", "good"]):
        code, _, err = run(*command)
        assert code == 2
        assert err.count("edgeloop:") == 1
        assert name in err


def test_a_tampered_ledger_is_named(room, run):
    """Nothing is listed or decided while a line is not as it was written."""
    text = room.ledger.path.read_text(encoding="utf-8")
    room.ledger.path.write_text(text.replace('"registered"', '"approved"', 1), encoding="utf-8")
    for command in (["list"], ["approve", MODEL, "2", "--why", "good"]):
        code, _, err = run(*command)
        assert code == 2
        assert "ledger.jsonl, line 1 was changed" in err


def test_a_build_catches_up_with_the_pages(room, capsys):
    """What it took over is said on stderr; with nothing to take over it says nothing."""
    room.set_tag(3, reviewed_by="A\x1b[2Jda", review_state="approved")
    catch_up(room.workspace)
    assert "edgeloop-tiny version 3: approved by A [2Jda: no reason given" in capsys.readouterr().err
    catch_up(room.workspace)
    assert capsys.readouterr().err == ""
