"""The build: what is due walked as a Prefect flow (`flows/walk.py`), or nothing. Nobody has to run a server.

Looking for stale stages comes first and needs neither Prefect nor MLflow, so a build with nothing to do takes
about a second.
"""

import hashlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from flows import stages
from flows.artifacts import links
from flows.inputs import SectionCheck
from flows.review import catch_up, quiet_mlflow
from flows.servers.report_pages import REPORT
from flows.walk import Steps, Walked, walk
from tasks import champion_files
from tasks.gate import require_judged
from tasks.mlflow_file import version_exists
from tasks.stage import read_json, write_json
from tasks.summary import variants
from tasks.tracking import (
    check_store,
    shown,
    spool_folder,
    sqlite_file,
    state_folder,
    tracking_uri,
    wait_until_written,
)
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.report.write import Drawn

_WRITER_GRACE_S = 60.0
_PRINTED = ("preset", "seconds", "variants", "gate", "registered")
"""What the JSON of a build has; the rest is for people."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a build came to; `edgeloop build --json` prints it."""

    preset: str
    seconds: float
    variants: list[dict[str, Any]]
    gate: dict[str, Any]
    registered: dict[str, Any] | None
    """Name and version, None when the gate refused."""
    ran: list[str]
    """Stages that were due."""
    champion: dict[str, Any]
    """champion/champion.json; empty when nothing has been released."""
    comparison: dict[str, Any]
    """Each variant against the champion's, as in reports/gate.json."""

    def to_json(self) -> str:
        """The JSON of the command line."""
        record = asdict(self)
        return json.dumps({name: record[name] for name in _PRINTED}, indent=1)


def build(workspace: Workspace) -> Built:
    """Bring a workspace up to date, judge it and register it.

    Raises:
        UserError, StageFailedError: see `flows.stages`.
    """
    started = time.monotonic()
    build_id = f"build-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    uri = tracking_uri(workspace.path)
    check_store(uri)
    with _only_build(workspace):
        catch_up(workspace)  # first: another champion makes the gate due
        plan = stages.plan(workspace)
        done = None if _is_due(workspace, plan) else _concluded(workspace, uri)
        if done is None:
            with SectionCheck(workspace, plan.stale, stages.stage_environment(workspace)) as sections:
                conclusion = _Conclusion(workspace, build_id, uri)
                steps = Steps(
                    ready=sections.require,
                    judge=conclusion.judge,
                    register=conclusion.register,
                    links=lambda registered: links(workspace, build_id, uri, registered),
                )
                done = walk(workspace, plan, build_id, steps)
    return Built(
        preset=workspace.name,
        seconds=round(time.monotonic() - started, 2),
        variants=variants(workspace.path / "reports"),
        gate={"verdict": done.gate["verdict"], "checks": done.gate["checks"]},
        registered=done.registered,
        ran=done.ran,
        champion=read_json(workspace.path / champion_files.FOLDER / champion_files.RECORD),
        comparison=done.gate.get("comparison", {}),
    )


@contextmanager
def _only_build(workspace: Workspace) -> Iterator[None]:
    """Let one build at a time work on a workspace; the second says that it waits."""
    folder = state_folder(workspace.path)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"build-{workspace.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another build of {workspace.name} is running; waiting for it to end", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_due(workspace: Workspace, plan: stages.Plan) -> bool:
    return bool(plan.stale) or not _same_devices(workspace, plan.always)


def _same_devices(workspace: Workspace, always: frozenset[str]) -> bool:
    """Whether the probes, which always run, would write what they wrote; only this host can tell at once."""
    if always != {"probe@local"}:
        return False
    from tasks.probe import probe_local

    report = workspace.path / "reports" / "probe" / "local.json"
    return report.is_file() and bool(read_json(report) == probe_local())


def _concluded(workspace: Workspace, uri: str) -> Walked | None:
    """What an earlier build came to when nothing is left to do, not even to register; needs no Prefect."""
    gate = read_json(workspace.path / "reports" / "gate.json")
    require_judged(workspace.path, gate)
    _require_report(workspace)
    registered = _known_registration(workspace, uri) if gate["verdict"] == "pass" else None
    return (
        None
        if gate["verdict"] == "pass" and not registered
        else Walked(ran=[], gate=gate, registered=registered)
    )


class _Conclusion:
    """What follows the last stage: the report is drawn once, for people and for the registry."""

    def __init__(self, workspace: Workspace, build_id: str, uri: str) -> None:
        self._workspace, self._build_id, self._uri = workspace, build_id, uri
        self._report: Drawn | None = None

    def judge(self) -> dict[str, Any]:
        """Give what reports/gate.json says, once it is of what lies there."""
        folder = self._workspace.path
        gate: dict[str, Any] = read_json(folder / "reports" / "gate.json")
        require_judged(folder, gate)
        (folder / "reports" / REPORT).unlink(missing_ok=True)  # of an earlier verdict
        from tasks.report.write import Drawn, write_report

        self._report = Drawn.now(write_report(folder), gate["evidence_sha256"])
        _wait_for_tracking(self._workspace, self._build_id, self._uri)  # a version is linked to stages' runs
        return gate

    def register(self) -> dict[str, Any]:
        """Name and version of what was judged: an earlier build's, or new ones."""
        workspace, uri = self._workspace, self._uri
        if known := _known_registration(workspace, uri):
            return known
        quiet_mlflow()
        from tasks.register import register

        registered = asdict(register(workspace, self._build_id, self._report))
        write_json(_receipt(workspace), {**_evidence(workspace, uri), "registered": registered})
        return registered


def _require_report(workspace: Workspace) -> None:
    """See that there is a release report: of a refused build, too, and where git has the verdict alone."""
    if not (workspace.path / "reports" / REPORT).is_file():
        from tasks.report.write import write_report

        write_report(workspace.path)


def _receipt(workspace: Workspace) -> Path:
    return state_folder(workspace.path) / "registered" / f"{workspace.name}.json"


def _evidence(workspace: Workspace, uri: str) -> dict[str, str]:
    """What a registration is of, and where it is: the store's address may hold a password."""
    gate = read_json(workspace.path / "reports" / "gate.json")
    return {"evidence": gate["evidence_sha256"], "store_sha256": hashlib.sha256(uri.encode()).hexdigest()}


def _read_receipt(path: Path) -> dict[str, Any]:
    """What an earlier build noted of its registration; nothing where the note is missing or damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {**known, "registered": {key: known["registered"][key] for key in ("name", "version")}}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # registering finds the version by its bytes


def _known_registration(workspace: Workspace, uri: str) -> dict[str, Any] | None:
    """Name and version of what an earlier build registered of this evidence, when the store still has it."""
    known = _read_receipt(_receipt(workspace))
    same = all(known.get(name) == value for name, value in _evidence(workspace, uri).items())
    return dict(known["registered"]) if same and _still_registered(uri, known["registered"]) else None


def _still_registered(uri: str, registered: Mapping[str, Any]) -> bool:
    """Look into the embedded store without importing MLflow; for any other, say no and let MLflow look."""
    database = sqlite_file(uri)
    if database is None:
        return False
    try:
        return version_exists(database, registered["name"], registered["version"])
    except sqlite3.Error:
        return False


def _wait_for_tracking(workspace: Workspace, build_id: str, uri: str) -> None:
    if not wait_until_written(spool_folder(workspace.path, build_id), _WRITER_GRACE_S):
        print(
            f"warning: MLflow at {shown(uri)} has not all of this build's runs yet; "
            "the next build sends the rest",
            file=sys.stderr,
        )
