"""The only place where Prefect meets DVC: which stages there are, which are stale, and running one.

DVC owns the graph and decides what is up to date. A stage runs in a `dvc` process of its own: killing the
build leaves DVC's lock with that process, so the next build waits for it instead of writing beside it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from fleet.device.errors import EdgeloopError, UserError
from flows.dvc_child import innermost, locked
from flows.dvc_rwlock import FILE, holders
from flows.inputs import check_workspace
from tasks.stage import FAILURE_FILE
from tasks.tracking import BUILD_ID, BUILD_OWNER, QUIET_TOOLS, tracking_uri
from tasks.workspace import Workspace, python_path

# What DVC tells people who type its commands, after every stage.
_DVC_HINTS = (
    "To track the changes with git",
    "git add ",
    "To enable auto staging",
    "dvc config core.autostage",
    "Updating lock file",
    "Generating lock file",
)


_LOCK_LIMIT_S = 60.0
"""How long a DVC process of somebody else is waited for."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A workspace's stages in an order in which they can run, and those that have to."""

    upstream: Mapping[str, frozenset[str]]
    """Stage to those it reads from directly, in the order to run; a matrix one is named `benchmark@local`."""
    stale: frozenset[str]
    """Changed against dvc.lock, or never run."""
    always: frozenset[str]
    """Run every time; unlike a stale stage such a one need not have anything new to say."""


class StageFailedError(EdgeloopError):
    """A stage ended with an error, which this one says: the stage itself did not print it."""

    def __init__(self, stage: str, exit_code: int, message: str) -> None:
        """Keep the stage's own exit code, which DVC replaces by its own.

        Args:
            stage: Its name in dvc.yaml.
            exit_code: 2 or 3.
            message: What the stage left word of.
        """
        super().__init__(f"stage {stage}: {message}")
        self.stage, self.exit_code = stage, exit_code


def plan(workspace: Workspace) -> Plan:
    """Ask DVC for the graph and for what changed.

    Raises:
        UserError: dvc.yaml, params.yaml or the source images are missing or cannot be used.
    """
    from dvc.exceptions import DvcException
    from dvc.lock import LockError

    check_workspace(workspace)
    file = str(workspace.path / "dvc.yaml")
    give_up_at = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            return _plan(workspace.path, file)
        except LockError as error:
            if _unlock_if_killed(workspace.repository / FILE):
                continue
            if time.monotonic() > give_up_at:
                raise locked(workspace.name, str(error)) from error
            time.sleep(1)
        except DvcException as error:
            raise UserError(
                f"{file}: {innermost(error)}",
                allowed="a link to the dvc.yaml at the repository's root, and a params.yaml that fits it",
                next_step="correct the file named; `git checkout` brings the original back",
            ) from error


def _plan(folder: Path, file: str) -> Plan:
    from dvc.repo import Repo
    from dvc.repo.index import Index
    from networkx import lexicographical_topological_sort

    with Repo(str(folder), _wait_for_lock=True) as repo, repo.lock:
        # This workspace's alone: `repo.index` fails when any other is broken.
        index = Index.from_file(repo, file)
        position = {stage: number for number, stage in enumerate(index.stages)}
        graph = index.graph.reverse(copy=True)  # DVC's edges lead to what is read
        order = list(lexicographical_topological_sort(graph, key=position.__getitem__))
        states: dict[str, list[Any]] = {
            stage.name: next(iter(stage.status().values()), []) for stage in order
        }
        return Plan(
            upstream={s.name: frozenset(before.name for before in graph.predecessors(s)) for s in order},
            stale=frozenset(name for name, state in states.items() if _differs(state)),
            always=frozenset(stage.name for stage in order if stage.always_changed),
        )


def _unlock_if_killed(rwlock: Path) -> bool:
    """Remove DVC's list of busy paths when every process in it is dead; True when it was.

    DVC asks only whether the process id exists, and a killed process that nobody has waited for still does.
    """
    from dvc.lock import make_lock
    from dvc.rwlock import RWLOCK_LOCK

    with make_lock(str(rwlock.with_name(RWLOCK_LOCK)), tmp_dir=str(rwlock.parent)):  # DVC edits it under this
        try:
            there = holders(rwlock)
        except (OSError, ValueError):  # not as we know it
            return False
        if not there or any(_is_running(holder.pid) for holder in there):
            return False
        rwlock.unlink()
        return True


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _differs(state: list[Any]) -> bool:
    """Whether DVC's status of a stage says more than that it runs every time."""
    return any(entry != "always changed" for entry in state)


def reproduce(workspace: Workspace, stage: str, build_id: str, more: Mapping[str, str]) -> None:
    """Run one stage through DVC, which skips it when nothing changed; what is printed goes to stderr.

    Args:
        workspace: Whose stage.
        stage: Its name in dvc.yaml.
        build_id: Of its run in MLflow.
        more: What its environment must have besides.

    Raises:
        StageFailedError: the stage or DVC ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        failure = Path(folder) / "failure.json"
        env = {**stage_environment(workspace), **more, BUILD_ID: build_id, FAILURE_FILE: str(failure)}
        command = [sys.executable, "-m", "flows.dvc_child", stage]
        with subprocess.Popen(command, cwd=workspace.path, env=env, stdout=subprocess.PIPE, text=True) as dvc:
            for line in dvc.stdout or ():
                if line.strip() and not line.lstrip().startswith(_DVC_HINTS):
                    print(line, end="", file=sys.stderr, flush=True)
        if dvc.returncode == 0:
            return
        if failure.exists():
            said = json.loads(failure.read_text(encoding="utf-8"))
            raise StageFailedError(stage, said["exit_code"], said["error"])
        code = dvc.returncode if dvc.returncode in (2, 3) else EdgeloopError.exit_code
        raise StageFailedError(
            stage, code, f"ended with exit code {dvc.returncode}; what it printed stands above"
        )


def stage_environment(workspace: Workspace) -> dict[str, str]:
    """The environment in which `python` is this interpreter and the code is the workspace's repository's.

    Raises:
        UserError: there is no command `python` beside this interpreter.
    """
    here = Path(sys.executable).parent
    if shutil.which("python", path=str(here)) is None:
        raise UserError(
            f"{here} has no command `python`",
            allowed="a Python environment as `make setup` creates it",
            next_step="`make setup`, then `.venv/bin/edgeloop build`",
        )
    path = os.pathsep.join((str(here), os.environ.get("PATH", os.defpath)))
    own = {"PATH": path, "PYTHONPATH": python_path(workspace.repository), BUILD_OWNER: str(os.getpid())}
    own["MLFLOW_TRACKING_URI"] = tracking_uri(workspace.path)  # a stage works in another folder
    return dict(os.environ) | QUIET_TOOLS | own


def locked_outs(workspace: Workspace) -> dict[str, Any]:
    """Stage to the hashes of what it wrote, from dvc.lock."""
    path = workspace.path / "dvc.lock"
    if not path.is_file():
        return {}
    stages = yaml.safe_load(path.read_text(encoding="utf-8"))["stages"]
    return {
        name: {out["path"]: out.get("md5") for out in entry.get("outs", ())} for name, entry in stages.items()
    }
