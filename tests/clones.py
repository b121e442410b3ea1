"""Clones of the working tree under test, and `edgeloop` run in them as its users run it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def _git(*arguments: str, cwd: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout


def clone_repository(into: Path) -> Path:
    """A git clone that also has what is changed and not yet committed, committed there.

    Nothing has been released in it, whatever the working tree's champions are.
    """
    _git("clone", "--quiet", str(ROOT), str(into))
    for name in _git("ls-files", "--modified", "--others", "--exclude-standard").splitlines():
        source, target = ROOT / name, into / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
        else:
            target.unlink(missing_ok=True)
    for record in (into / "champion" / "champion.json", *into.glob("presets/*/champion/champion.json")):
        shutil.rmtree(record.parent)
        record.parent.mkdir()
        record.write_text("{}\n", encoding="utf-8")
    _git("config", "user.name", "test", cwd=into)
    _git("config", "user.email", "test@example.org", cwd=into)
    _git("add", "--all", cwd=into)
    _git("commit", "--quiet", "--allow-empty", "-m", "the tree under test", cwd=into)
    return into


def environment(clone: Path) -> dict[str, str]:
    """The environment of a user of `clone`: its code, the embedded stores, this interpreter as `python`."""
    ours = ("EDGELOOP_", "MLFLOW_", "PREFECT_", "PYTHONUNBUFFERED")  # the last one changes C's buffers, too
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return kept | {"PYTHONPATH": str(clone), "PATH": path}


def edgeloop(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `edgeloop` with the code of `clone`."""
    command = [sys.executable, "-m", "flows", *arguments]
    return subprocess.run(
        command, cwd=clone, env=environment(clone), capture_output=True, text=True, check=False
    )


@dataclass(frozen=True)
class TinyBuild:
    """The preset `tiny`, built once a session; do not change it, copy it."""

    clone: Path
    """The clone's root."""
    result: dict[str, Any]
    """What `edgeloop build --json` printed."""
    stderr: str

    @property
    def workspace(self) -> Path:
        """The folder with models/mnn, reports and dvc.lock."""
        return self.clone / "presets" / "tiny"
