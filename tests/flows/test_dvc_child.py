"""What DVC raises becomes an error for people: exit 2 with a next step where the user can mend it."""

import errno
import json
import subprocess
import sys

import pytest
from clones import environment
from dvc.dependency.param import BadParamFileError, MissingParamsError
from dvc.exceptions import DvcException, ReproductionError
from dvc.lock import LockError
from dvc.stage.exceptions import MissingDataSource, StageCmdFailedError
from dvc.utils.serialize import YAMLFileCorruptedError

from flows.dvc_child import explain, innermost


def _raised(cause: BaseException) -> BaseException:
    """As `Repo.reproduce` raises it."""
    error = ReproductionError("failed to reproduce 'train'")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/cache"), 2, "no room to write /x/cache"),
        (OSError(errno.EFBIG, "File too large", "/x/cache"), 2, "ulimit -f"),
        (FileNotFoundError(2, "No such file or directory", "/x/images.tar"), 2, "/x/images.tar"),
        (PermissionError(13, "Permission denied", "/x/images"), 2, "chmod"),
        (MissingDataSource(["images.tar"]), 2, "images.tar"),
        (MissingParamsError("train is not in params.yaml"), 2, "a section for each stage"),
        (BadParamFileError("params.yaml is a folder"), 2, "a section for each stage"),
        (YAMLFileCorruptedError("params.yaml"), 2, "a section for each stage"),
        (LockError("busy, it is being blocked by: (PID 7)"), 2, "wait until it has ended"),
        (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), 2, "not UTF-8"),
        (StageCmdFailedError("python -m tasks.train", 127), 2, "make setup"),
        (StageCmdFailedError("python -m tasks.train", -9), 3, "memory ran out"),
        (StageCmdFailedError("python -m tasks.train", 137), 3, "memory ran out"),
        (StageCmdFailedError("python -m tasks.train", -11), 3, "exited with -11"),
        (DvcException("something new"), 3, "something new"),
        (ZeroDivisionError(), 3, "ZeroDivisionError"),
    ],
    ids=repr,
)
def test_causes(cause, code, said):
    """The cause decides, not the wrapper; the text is one that can be printed."""
    error = explain(_raised(cause))
    assert error.exit_code == code
    assert said in str(error)
    assert "255" not in str(error)
    str(error).encode("utf-8")


@pytest.mark.parametrize(("place", "name"), [(".", "digits"), ("presets/tiny", "tiny")])
def test_a_lock_names_the_workspace_as_the_command_line_does(tmp_path, monkeypatch, place, name):
    """The root's is `digits`, whatever its folder is called."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / place)
    assert f"workspace {name}: " in explain(_raised(LockError("busy"))).got


def test_a_cause_is_told_once():
    """DVC repeats inner messages in outer ones."""
    inner = DvcException("no key `x`")
    outer = DvcException("params.yaml: no key `x`")
    outer.__cause__ = inner
    assert innermost(_raised(outer)) == "params.yaml: no key `x`"


def test_the_reason_reaches_the_build(make_clone, tmp_path):
    """A file that a stage depends on is gone after the plan was made: which one, and what to do."""
    clone, failure = make_clone(), tmp_path / "failure.json"
    (clone / "tasks" / "data" / "digits.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "flows.dvc_child", "prepare"],
        cwd=clone / "presets" / "tiny",
        env=environment(clone) | {"EDGELOOP_FAILURE_FILE": str(failure)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    said = json.loads(failure.read_text(encoding="utf-8"))
    assert said["exit_code"] == 2
    assert "digits.py" in said["error"]
    assert "next:" in said["error"]
    assert "digits.py" not in done.stderr  # the build prints it, once
