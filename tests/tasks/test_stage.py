"""The frame of a stage: what it accepts from params.yaml and how it fails."""

import errno
import json
import shutil
import sqlite3
import time

import pytest
from pydantic import Field

from fleet.device.errors import EngineError, UserError
from tasks.stage import FAILURE_FILE, SECONDS, Params, load_params, read_json, stage, write_json
from tasks.workspace import disk_full


class DemoParams(Params):
    """A section with one constrained field."""

    epochs: int = Field(default=3, ge=0)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """An empty workspace as the working directory, with its own tracking store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return tmp_path


def test_an_empty_section_takes_the_defaults(workspace):
    """`demo:` with nothing under it is a section."""
    (workspace / "params.yaml").write_text("demo:\n", encoding="utf-8")
    assert load_params("demo", DemoParams).epochs == 3


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("other: {}\n", "no section `demo`"),
        ("demo: {epoch: 3}\n", "demo.epoch"),
        ("demo: {epochs: -1}\n", "demo.epochs"),
        ("demo: {epochs: yes}\n", "epochs is True, which is no number"),
        ("demo: {epochs: off}\n", "epochs is False, which is no number"),
        ("demo: {epochs: '3'}\n", "epochs is '3', which is no number"),
        ("demo: [1]\n", "demo"),
        ("demo: {epochs: [\n", "params.yaml"),
        ("- 1\n", "no section at all"),
        ("", "no section at all"),
    ],
)
def test_a_wrong_params_file_names_the_place(workspace, text, got):
    """A missing section, a misspelt key, a forbidden value, a wrong shape and broken YAML each say where."""
    (workspace / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_params("demo", DemoParams)
    assert got in error.value.got
    assert error.value.next_step


def test_no_params_file_says_how_to_get_one(workspace):
    """Run outside a workspace: the error names `edgeloop init`."""
    with pytest.raises(UserError, match="edgeloop init"):
        load_params("demo", DemoParams)


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("g", allowed="a", next_step="n"), 2), (EngineError("r", engine_said="s"), 3)],
)
def test_an_error_ends_the_stage_with_its_code_and_text(workspace, capsys, error, code):
    """User errors exit 2, engine errors 3; stderr names the stage; no report is left."""
    (workspace / "params.yaml").write_text("demo: {}\n", encoding="utf-8")
    with pytest.raises(SystemExit) as exit_info, stage("demo", DemoParams):
        raise error
    assert exit_info.value.code == code
    assert capsys.readouterr().err.strip().endswith(f"demo: {error}")
    assert not (workspace / "reports").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "models/x"),
        OSError(errno.EFBIG, "File too large", "models/x"),
        sqlite3.OperationalError("database or disk is full"),
    ],
    ids=repr,
)
def test_a_full_disk_is_the_users_to_mend(workspace, monkeypatch, capsys, error):
    """Whatever library met it: exit 2, and the build reads why."""
    (workspace / "params.yaml").write_text("demo: {}\n", encoding="utf-8")
    monkeypatch.setenv(FAILURE_FILE, str(workspace / "failure.json"))
    with pytest.raises(SystemExit) as exit_info, stage("demo", DemoParams):
        raise RuntimeError("torch could not write") from error
    assert exit_info.value.code == 2
    said = json.loads((workspace / "failure.json").read_text())["error"]
    assert "no room to write" in said
    assert "free some space" in said
    assert capsys.readouterr().err == ""  # the build prints it, and nobody reads it twice


def test_a_disk_without_room_explains_any_error(workspace, monkeypatch):
    """torch says `file write failed`; that there is no byte left says why."""
    usage = shutil.disk_usage(workspace)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=0))
    assert "file write failed" in disk_full(RuntimeError("file write failed"), workspace).got
    monkeypatch.undo()
    assert disk_full(RuntimeError("file write failed"), workspace) is None


def test_a_bug_leaves_its_name_and_its_traceback(workspace, monkeypatch):
    """An unforeseen error comes through, and the build reads what it was."""
    (workspace / "params.yaml").write_text("demo: {}\n", encoding="utf-8")
    monkeypatch.setenv(FAILURE_FILE, str(workspace / "failure.json"))
    with pytest.raises(ZeroDivisionError), stage("demo", DemoParams):
        raise ZeroDivisionError("1/0")
    said = json.loads((workspace / "failure.json").read_text())
    assert said["exit_code"] == 3
    assert "ZeroDivisionError: 1/0" in said["error"]


def test_the_time_a_stage_computed_is_measured(workspace):
    """Only the body counts, and only when it came to an end."""
    (workspace / "params.yaml").write_text("demo: {}\n", encoding="utf-8")
    with stage("demo", DemoParams):
        time.sleep(0.05)
    assert 0.05 <= read_json(workspace / SECONDS / "demo.json")["seconds"] < 5


def test_json_is_the_same_bytes_whatever_the_order(tmp_path):
    """Key order does not reach the file; neither does a half-written file."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    write_json(a, {"x": 1, "y": [0.1, None]})
    write_json(b, {"y": [0.1, None], "x": 1})
    assert a.read_bytes() == b.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_nan_is_refused_and_the_old_file_stays(tmp_path):
    """A NaN metric would be no JSON: the write fails and the earlier report is untouched."""
    path = tmp_path / "r.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"x": 1}


def test_reading_a_missing_report_says_which_command_writes_it(tmp_path):
    """The next step after a missing report is `dvc repro`."""
    with pytest.raises(UserError, match="dvc repro"):
        read_json(tmp_path / "none.json")
