"""Workspaces are found by name and place; nothing computes with other code or packages than were hashed."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.device.errors import UserError
from tasks import workspace

ROOT = Path(__file__).resolve().parents[2]


def test_names_lead_to_folders(monkeypatch):
    """The root is `digits`; presets go by their folder's name."""
    monkeypatch.chdir(ROOT)
    assert workspace.find_workspace("digits").path == ROOT
    assert workspace.find_workspace("tiny").path == ROOT / "presets" / "tiny"
    with pytest.raises(UserError, match="'nowhere'"):
        workspace.find_workspace("nowhere")


@pytest.mark.parametrize(
    ("place", "name"),
    [(".", "digits"), ("presets/tiny", "tiny"), ("tasks/nn", "digits"), ("presets", "digits")],
)
def test_without_a_name_it_is_the_one_around(monkeypatch, place, name):
    """Inside a workspace's folder no name is needed; elsewhere it is the default."""
    monkeypatch.chdir(ROOT / place)
    assert workspace.find_workspace(None).name == name


def test_outside_any_repository_it_is_that_of_the_code(monkeypatch, tmp_path):
    """`edgeloop build` works from everywhere."""
    monkeypatch.chdir(tmp_path)
    assert workspace.repository() == ROOT


def test_another_copy_of_the_code_is_refused(monkeypatch, tmp_path):
    """DVC hashed one clone, Python imports another: the result would not be what the hashes say."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "stage.py").touch()
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    with pytest.raises(UserError, match="Python imports it from"):
        workspace.check_environment()
    monkeypatch.setenv("DVC_ROOT", str(ROOT))
    workspace.check_environment()


def test_another_engine_than_the_pinned_one_is_refused(monkeypatch):
    """The pin is a dependency of the stages; with another wheel it would lie."""
    versions = {"mnn": "3.5.0"}
    real = workspace.importlib.metadata.version
    monkeypatch.setattr(
        workspace.importlib.metadata, "version", lambda name: versions.get(name) or real(name)
    )
    with pytest.raises(UserError, match=r"mnn 3\.5\.0 installed"):
        workspace.check_environment()


def test_errors_that_come_from_each_other_have_an_end(tmp_path):
    """Libraries raise an old error from a new one; looking for a full disk stops where it began."""
    old, new = OSError(errno.ENOSPC, "No space left on device"), ValueError("new")
    old.__cause__, new.__cause__ = new, old
    assert workspace.causes(new) == [new, old]
    assert "No space left" in workspace.disk_full(new, tmp_path).got


def test_a_stage_computes_in_one_process_at_a_time(tmp_path):
    """A second process of one stage waits for the first: two writers would mix their outs."""
    code = (
        "import sys, time\nfrom tasks.workspace import only_process\n"
        "with only_process('train'):\n print('in', flush=True)\n sys.stdin.read()\n"
    )

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    with start() as first:
        assert first.stdout.readline() == "in\n"
        with start() as second:
            assert "waiting for its end" in second.stderr.readline()
            first.kill()  # as kill -9 does: the lock goes with the process
            assert second.stdout.readline() == "in\n"
