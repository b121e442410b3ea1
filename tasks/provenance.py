"""Where a result came from: git commit, dvc.lock, hashes over what a stage read and over what is released."""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_WRITTEN = tuple(f":(top,exclude,glob)**/{path}" for path in ("dvc.lock", "reports/**", "champion/**"))


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """What DVC compares to decide whether a stage is stale."""

    command: str
    deps: Mapping[str, str]
    """Path as dvc.yaml names it to content hash (MD5; a folder's ends in `.dir`)."""
    params: Mapping[str, Mapping[str, Any]]
    """Params file to section to values."""

    @property
    def stage_hash(self) -> str:
        """SHA-256 of all of it: two runs with one stage hash computed the same thing."""
        record = {"command": self.command, "deps": dict(self.deps), "params": self.params}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @property
    def data_digest(self) -> str:
        """Content hash of the prepared dataset, empty where the stage does not read it."""
        return self.deps.get("data/prepared", "")

    def tags(self) -> str:
        """Both as the JSON that tracking keeps."""
        return json.dumps({"stage_hash": self.stage_hash, "data_digest": self.data_digest})


def inputs_now(workspace: Path, stage: str) -> StageInputs:
    """A stage's inputs as they lie in the workspace, hashed by DVC, which reads only changed files."""
    from dvc.repo import Repo

    with Repo(str(workspace)) as repo:
        return inputs_in(repo, workspace, stage)


def inputs_in(repo: Any, workspace: Path, stage: str) -> StageInputs:
    """`inputs_now` through a DVC repository that is open already."""
    from dvc.dependency import ParamsDependency

    node = repo.stage.load_one(str(workspace / "dvc.yaml"), stage)
    node.save_deps()
    params, deps = {}, {}
    for dep in node.deps:
        if isinstance(dep, ParamsDependency):
            params[dep.def_path] = dep.hash_info.value
        else:
            deps[dep.def_path] = dep.hash_info.value
    return StageInputs(command=node.cmd, deps=deps, params=params)


def origin(workspace: Path) -> dict[str, str]:
    """Tags that say what a stage is computed from, as far as milliseconds tell; the rest is `main`'s."""
    return {
        "git_commit": git_commit(workspace),
        "dvc_lock_sha256": lock_sha256(workspace),
        "engine_version": importlib.metadata.version("MNN"),
    }


def inputs_locked(workspace: Path) -> dict[str, StageInputs]:
    """The inputs each stage last ran with, from dvc.lock; empty when nothing has run."""
    path = workspace / "dvc.lock"
    if not path.is_file():
        return {}
    stages = yaml.safe_load(path.read_text(encoding="utf-8"))["stages"]
    return {
        name: StageInputs(
            command=entry["cmd"],
            deps={dep["path"]: dep["md5"] for dep in entry.get("deps", ())},
            params=entry.get("params", {}),
        )
        for name, entry in stages.items()
    }


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock_sha256(workspace: Path) -> str:
    """SHA-256 of the workspace's dvc.lock, empty when there is none."""
    path = workspace / "dvc.lock"
    return sha256_of(path) if path.is_file() else ""


def release_sha256(models: Path) -> str:
    """One hash over all converted models and their cards: what a device would get."""
    files = sorted(path for path in models.glob("*/*") if path.is_file())
    lines = [f"{sha256_of(path)}  {path.relative_to(models).as_posix()}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def git_commit(folder: Path) -> str:
    """The commit checked out, with `-dirty` after it where tracked files differ; empty outside git.

    What builds write themselves (dvc.lock, reports, the champion) makes none dirty: it follows from the rest.
    """
    head = _git(folder, "rev-parse", "HEAD")
    changed = head and _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", *_WRITTEN)
    return f"{head}-dirty" if changed else head


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; empty when it fails."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    """`python -m tasks.provenance WORKSPACE STAGE` prints the tags over all that the stage reads, as JSON."""
    print(inputs_now(Path(sys.argv[1]), sys.argv[2]).tags())


if __name__ == "__main__":
    main()
