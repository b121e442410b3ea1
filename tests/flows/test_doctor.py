"""The doctor finds what was broken on purpose, and says how to mend it."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from flows import doctor

ROOT = Path(__file__).resolve().parents[2]


def by_name(findings):
    """Findings by what they looked at."""
    return {finding.check: finding for finding in findings}


def test_every_finding_that_is_not_ok_has_a_next_step():
    """On this checkout: whatever is found, nobody is left without a way on; the engine works."""
    findings = doctor.examine(ROOT, ROOT)
    assert by_name(findings)["engine"].status == "ok"
    assert by_name(findings)["engine wheel"].status == "ok"
    assert [f for f in findings if f.status != "ok" and not f.next_step] == []


def test_json_output_is_one_document_and_the_code_follows_it(capsys):
    """--json prints {ok, findings}; exit 0 exactly when nothing is a problem."""
    code = doctor.run(root=ROOT, workspace=ROOT, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (code == 0)
    assert document["ok"] == all(f["status"] != "problem" for f in document["findings"])


def test_a_package_that_differs_from_the_lock_is_named(tmp_path):
    """A lock with another numpy and an unknown package: both named with what is installed."""
    (tmp_path / "requirements.lock").write_text("numpy==1.0.0\nno-such-package==1.0\n", encoding="utf-8")
    (finding,) = doctor.check_packages(tmp_path)
    assert finding.status == "warning"
    assert "numpy" in finding.found
    assert "no-such-package missing" in finding.found
    assert "make setup" in finding.next_step


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda text: text.replace("gate:", "gate: {min_topl: 0.9}\nold_gate:"), "gate.min_topl"),
        (lambda text: text.replace("\nconvert:", "\nconverted:"), "no section `convert`"),
    ],
)
def test_a_broken_workspace_is_a_problem(tmp_path, edit, expected):
    """A misspelt threshold and a missing section are found before a build spends an hour."""
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(edit(text), encoding="utf-8")
    finding = by_name(doctor.check_workspace(tmp_path))["workspace"]
    assert finding.status == "problem"
    assert expected in finding.found


def test_missing_source_images_are_a_problem(tmp_path):
    """A workspace whose images are not where it says."""
    shutil.copy(ROOT / "params.yaml", tmp_path / "params.yaml")
    finding = by_name(doctor.check_workspace(tmp_path))["source images"]
    assert finding.status == "problem"
    assert "does not exist" in finding.found


def test_a_damaged_tracking_store_is_found_and_a_sound_one_is_not(tmp_path, monkeypatch):
    """SQLite's own check decides; the next step keeps models and reports."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    database = tmp_path / ".edgeloop" / "mlflow.db"
    database.parent.mkdir()
    with sqlite3.connect(database) as connection:
        connection.execute("create table t(x)")
    connection.close()
    assert next(doctor.check_tracking(tmp_path)).status == "ok"
    database.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    assert next(doctor.check_tracking(tmp_path)).status == "problem"


def test_a_tracking_server_that_is_down_is_a_problem(tmp_path, monkeypatch):
    """Nothing listens on the discard port of loopback."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    finding = next(doctor.check_tracking(tmp_path))
    assert finding.status == "problem"
    assert "127.0.0.1:9" in finding.found
