"""DVC's list of busy paths after a kill."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import build, stages
from tasks.champion import write_champion
from tasks.stage import write_json
from tasks.workspace import Workspace


def _rwlock(folder: Path, *pids: int) -> Path:
    path = folder / "rwlock"
    write = {f"out-{pid}": {"pid": pid, "cmd": "dvc"} for pid in pids}
    path.write_text(json.dumps({"write": write, "read": {"dep": [{"pid": pids[0], "cmd": "dvc"}]}}))
    return path


def test_the_lock_of_a_killed_process_is_removed(tmp_path):
    """A dead process that nobody has waited for holds nothing, though its id still exists."""
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # ended, and left a zombie
    path = _rwlock(tmp_path, zombie.pid)
    assert stages._unlock_if_killed(path)
    assert not path.exists()
    zombie.wait()


def test_the_lock_of_a_living_process_stays(tmp_path):
    """One living holder among dead ones keeps the list."""
    path = _rwlock(tmp_path, 2**22 - 1, os.getpid())
    assert not stages._unlock_if_killed(path)
    assert path.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"write": {"x": {}}}', '{"read": 3}'])
def test_a_list_in_another_form_is_left_alone(tmp_path, text):
    """What is not understood is not deleted."""
    path = tmp_path / "rwlock"
    path.write_text(text)
    assert not stages._unlock_if_killed(path)
    assert path.exists()


def test_the_stages_get_the_store_that_the_caller_means(tmp_path, monkeypatch):
    """A stage works in its workspace: a path that counts from the caller's folder would be another file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    workspace = Workspace(name="w", path=tmp_path / "presets" / "w", repository=tmp_path)
    assert stages.stage_environment(workspace)["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/runs.db"


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_a_store_that_is_stuck_is_waited_for_once(tmp_path, monkeypatch, capsys, verdict):
    """Before the version is made that links to the runs; one wait and one warning a build."""
    (tmp_path / ".dvc").mkdir()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    gate = {"verdict": verdict, "checks": [], "evidence": {}, "evidence_sha256": "e"}
    write_json(tmp_path / "reports" / "gate.json", gate)
    write_champion(tmp_path / "champion")
    did = []
    monkeypatch.setattr(build, "wait_until_written", lambda folder, limit_s: bool(did.append("wait")))
    register = SimpleNamespace(
        register=lambda w, build_id, report: did.append("register") or Registered("m", 1)
    )
    monkeypatch.setitem(sys.modules, "tasks.register", register)
    nothing = stages.Plan(upstream={}, stale=frozenset(), always=frozenset())
    monkeypatch.setattr(stages, "plan", lambda workspace: nothing)
    monkeypatch.setattr(build, "_same_devices", lambda workspace, always: False)
    monkeypatch.setattr(build, "require_judged", lambda workspace, gate: None)
    monkeypatch.setattr(build, "variants", lambda reports: [])

    def walk(workspace, plan, build_id, steps):
        gate = steps.judge()
        registered = steps.register() if gate["verdict"] == "pass" else None
        return build.Walked(ran=[], gate=gate, registered=registered)

    monkeypatch.setattr(build, "walk", walk)
    monkeypatch.setattr(build.os, "environ", dict(os.environ))
    build.build(Workspace(name="w", path=tmp_path, repository=tmp_path))
    assert did == ["wait", *(["register"] if verdict == "pass" else [])]
    assert capsys.readouterr().err.count("warning") == 1


@dataclass
class Registered:
    """A version."""

    name: str
    version: int
