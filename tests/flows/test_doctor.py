"""The doctor finds what was broken on purpose, and says how to mend it."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from flows.doctor import environment, report, services
from flows.doctor import workspace as rooms
from flows.doctor.finding import Finding
from tasks.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
DIGITS = Workspace(name="digits", path=ROOT, repository=ROOT)


def by_name(findings):
    """Findings by what they looked at."""
    return {finding.check: finding for finding in findings}


def test_every_check_has_its_say():
    """On this checkout: the engine works, and no check is left out."""
    found = by_name(report.examine(DIGITS))
    assert found["engine"].status == "ok"
    assert found["engine wheel"].status == "ok"
    assert found["engine logger"].status == "ok"
    looked_at = {"python", "packages", "package files", "pip on PATH", "disk", "memory", "engine phone-home"}
    looked_at |= {"git", "writable", "dvc", "dvc cache", "workspace", "source images", "other workspaces"}
    assert looked_at | {"undelivered", "mlflow", "prefect"} <= set(found)
    assert any(name.startswith("lock") for name in found)  # named one by one while a build or benchmark runs


def test_json_output_is_one_document_and_the_code_follows_it(capsys):
    """--json prints {ok, findings}; exit 0 exactly when nothing is a problem."""
    code = report.run(DIGITS, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (code == 0)
    assert document["ok"] == all(f["status"] != "problem" for f in document["findings"])


def test_a_package_that_differs_from_the_lock_is_named(tmp_path):
    """A lock with another numpy and an unknown package: both named with what is installed."""
    (tmp_path / "requirements.lock").write_text("numpy==1.0.0\nno-such-package==1.0\n", encoding="utf-8")
    finding = next(environment.check_packages(tmp_path))
    assert finding.status == "warning"
    assert "numpy" in finding.found
    assert "no-such-package missing" in finding.found
    assert "pip install -r" in finding.next_step


@pytest.fixture
def workspace(tmp_path):
    """A repository of its own with the root's graph and parameters, and the module they name as source."""
    for name in ("params.yaml", "dvc.yaml", "tasks/data/digits.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return Workspace(name="digits", path=tmp_path, repository=tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("gate:", "gate: {min_topl: 0.9}\nold_gate:", "gate.min_topl"),
        ("\nconvert:", "\nconverted:", "none `convert`"),
        ("devices: [local]", "devices: local", "devices is 'local'"),
        ("devices: [local]", "devices: [phone]", "phone"),
        ("devices: [local]", "", "no section `devices`"),
        ("root: .", "root: ..", "root is '..'"),
    ],
)
def test_a_broken_workspace_is_a_problem(workspace, old, new, expected):
    """A misspelt threshold, section or device is found before a build spends an hour."""
    path = workspace.path / "params.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    found = [f for f in rooms.check_workspace(workspace) if f.check == "workspace"]
    assert {f.status for f in found} == {"problem"}
    assert expected in " ".join(f.found for f in found)


def test_the_stages_are_those_of_the_graph(workspace):
    """A stage that dvc.yaml gained is looked for in params.yaml; one that it lost is not."""
    graph = workspace.path / "dvc.yaml"
    graph.write_text(graph.read_text(encoding="utf-8").replace("\n  gate:", "\n  judge:"), encoding="utf-8")
    found = " ".join(finding.found for finding in rooms.check_workspace(workspace))
    assert "`gate` that no stage reads" in found
    assert "no section `judge`" in found


def test_a_missing_graph_is_a_problem(workspace):
    """Without dvc.yaml nothing can be built."""
    (workspace.path / "dvc.yaml").unlink()
    (finding,) = rooms.check_workspace(workspace)
    assert finding.status == "problem"
    assert "git checkout dvc.yaml" in finding.next_step


def test_missing_source_images_are_a_problem(workspace):
    """A workspace whose images are not where it says."""
    assert {f.status for f in rooms.check_workspace(workspace)} == {"ok"}
    (workspace.path / "tasks" / "data" / "digits.py").unlink()
    finding = by_name(rooms.check_workspace(workspace))["source images"]
    assert finding.status == "problem"
    assert "are not at" in finding.found


def test_every_broken_workspace_is_named(workspace):
    """The one that is asked about is sound; the others' troubles are told with their names."""
    for name, content in {"broken": "root: [", "empty": None}.items():
        folder = workspace.path / "workspaces" / name
        folder.mkdir(parents=True)
        (folder / "dvc.yaml").symlink_to("../../dvc.yaml")
        if content:
            (folder / "params.yaml").write_text(content, encoding="utf-8")
    found = by_name(rooms.check_other_workspaces(workspace))
    assert found["workspace broken"].status == "problem"
    assert "broken/params.yaml" in found["workspace broken"].found
    assert "no params.yaml" in found["workspace empty"].found


def test_a_finding_that_is_not_ok_needs_a_next_step():
    """The type itself refuses a problem without a way on."""
    with pytest.raises(AssertionError):
        Finding(check="x", status="problem", found="y")


def test_a_damaged_tracking_store_is_found_and_a_sound_one_is_not(tmp_path, monkeypatch):
    """SQLite's own check decides; the next step keeps models and reports."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    database = tmp_path / ".edgeloop" / "mlflow.db"
    database.parent.mkdir()
    with sqlite3.connect(database) as connection:
        connection.execute("create table t(x)")
    connection.close()
    assert next(services.check_mlflow(tmp_path)).status == "ok"
    database.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    assert next(services.check_mlflow(tmp_path)).status == "problem"


def test_a_tracking_server_that_is_down_is_a_problem(tmp_path, monkeypatch):
    """Nothing listens on the discard port of loopback."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    finding = next(services.check_mlflow(tmp_path))
    assert finding.status == "problem"
    assert "127.0.0.1:9" in finding.found


@pytest.mark.parametrize("uri", ["bogus", "bogus://x", "file:///runs"])
def test_a_store_that_no_build_would_take_is_a_problem(tmp_path, monkeypatch, uri):
    """The doctor asks what a build asks."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    finding = next(services.check_mlflow(tmp_path))
    assert finding.status == "problem"
    assert uri in finding.found
    assert "MLFLOW_TRACKING_URI" in finding.next_step


def test_a_store_s_password_is_not_shown(tmp_path, monkeypatch):
    """What the doctor prints is pasted into issues."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:s3cret@db/runs")
    finding = next(services.check_mlflow(tmp_path))
    assert finding.status == "problem"  # its driver is no part of edgeloop
    assert "driver `psycopg" in finding.found
    assert "s3cret" not in finding.found + finding.next_step
