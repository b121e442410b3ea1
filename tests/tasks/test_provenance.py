"""Where a result came from."""

import subprocess

import pytest

from tasks.provenance import git_commit


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit: code, and what builds write."""
    for name in (
        "tasks/a.py",
        "params.yaml",
        "dvc.lock",
        "reports/gate.json",
        "presets/p/champion/champion.json",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1", encoding="utf-8")
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "."],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [
        ("dvc.lock", False),
        ("reports/gate.json", False),
        ("presets/p/champion/champion.json", False),
        ("params.yaml", True),
        ("tasks/a.py", True),
    ],
)
def test_what_builds_write_makes_no_commit_dirty(checkout, changed, dirty):
    """The first build in an untouched clone is of that commit; changed code or parameters are of none."""
    clean = git_commit(checkout)
    assert len(clean) == 40
    (checkout / changed).write_text("2", encoding="utf-8")
    expected = f"{clean}-dirty" if dirty else clean
    assert git_commit(checkout) == git_commit(checkout / "presets" / "p") == expected


def test_outside_git_there_is_no_commit(tmp_path):
    """An archive without its history."""
    assert git_commit(tmp_path) == ""
