"""The build: stale stages one Prefect task each, then the registration. Needs no server.

Looking for stale stages comes first and needs neither Prefect nor MLflow, so a build with nothing to do takes
about a second.
"""

import hashlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from filelock import FileLock, Timeout

from fleet.device.errors import EngineError
from flows import stages
from flows.inputs import SectionCheck
from flows.interrupt import leave
from tasks.gate import require_judged
from tasks.stage import read_json, write_json
from tasks.summary import variants
from tasks.tracking import (
    QUIET_TOOLS,
    check_store,
    reading,
    shown,
    spool_folder,
    sqlite_file,
    state_folder,
    tracking_uri,
    wait_until_written,
)
from tasks.workspace import Workspace

_WRITER_GRACE_S = 60.0


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
    """Stages that were due; for people, not in the JSON."""

    def to_json(self) -> str:
        """The JSON of the command line."""
        record = asdict(self)
        del record["ran"]
        return json.dumps(record, indent=1)


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
        plan = stages.plan(workspace)
        ran: list[str] = []
        if plan.stale or not _same_devices(workspace, plan.always):
            with SectionCheck(workspace, plan.stale, stages.stage_environment(workspace)) as sections:
                ran = walk(workspace, plan, build_id, sections.require)
        gate = read_json(workspace.path / "reports" / "gate.json")
        require_judged(workspace.path, gate)
        _wait_for_tracking(workspace, build_id, uri)  # a version is linked to the stages' runs
        registered = _register(workspace, build_id, uri) if gate["verdict"] == "pass" else None
    return Built(
        preset=workspace.name,
        seconds=round(time.monotonic() - started, 2),
        variants=variants(workspace.path / "reports"),
        gate={"verdict": gate["verdict"], "checks": gate["checks"]},
        registered=registered,
        ran=ran,
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


def _same_devices(workspace: Workspace, always: frozenset[str]) -> bool:
    """Whether the probes, which always run, would write what they wrote; only this host can tell at once."""
    if always != {"probe@local"}:
        return False
    from tasks.probe import probe_local

    report = workspace.path / "reports" / "probe" / "local.json"
    return report.is_file() and bool(read_json(report) == probe_local())


def walk(workspace: Workspace, plan: stages.Plan, build_id: str, ready: Callable[[], None]) -> list[str]:
    """Run what is due, one Prefect task a stage, and return the stages' names.

    A stage is due when it is stale or when something it reads came out different.

    Args:
        workspace: Whose stages.
        plan: What is due.
        build_id: Of the stages' runs in MLflow.
        ready: Called once Prefect is up, before the first stage; raises when no stage may run.

    Raises:
        StageFailedError: a stage failed; those after it did not run.
        EngineError: Prefect gave the build up.
    """
    for key, value in _prefect_settings(workspace).items():
        os.environ.setdefault(key, value)
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE
    from prefect.client.schemas.objects import State
    from prefect.states import Failed

    ran: list[str] = []
    failures: list[Exception] = []

    def attempt(action: Callable[[], None]) -> State[None] | None:
        try:
            action()
        except KeyboardInterrupt:
            leave()
        except Exception as error:  # noqa: BLE001  # raised again below: Prefect only makes a state of it
            failures.append(error)
            return Failed(message=str(error))
        return None

    @task(cache_policy=NO_CACHE, task_run_name="{stage}")  # DVC is the cache
    def run(stage: str) -> State[None] | None:
        return attempt(lambda: stages.reproduce(workspace, stage, build_id))

    @flow(name=f"build-{workspace.name}", flow_run_name=build_id)
    def build_flow() -> State[None] | None:
        if unready := attempt(ready):
            return unready
        for stage in _due(workspace, plan):
            ran.append(stage)
            if not run(stage, return_state=True).is_completed():
                return Failed(message=f"{stage} did not complete")
        return None

    state = build_flow(return_state=True)
    _raise_unless_completed(state.is_completed(), failures, ran)
    return ran


def _due(workspace: Workspace, plan: stages.Plan) -> Iterator[str]:
    """Stages that are due, one by one: whether what one wrote differs is asked when the next is wanted."""
    changed: set[str] = set()
    for stage, upstream in plan.upstream.items():
        if stage in plan.stale | plan.always or upstream & changed:
            before = stages.locked_outs(workspace).get(stage)
            yield stage
            if stages.locked_outs(workspace).get(stage) != before:
                changed.add(stage)


def _raise_unless_completed(completed: bool, failures: list[Exception], ran: list[str]) -> None:
    if failures:
        raise failures[0]
    if not completed:
        raise EngineError(f"Prefect gave the build up at {ran[-1] if ran else 'its start'}")


def _prefect_settings(workspace: Workspace) -> dict[str, str]:
    """Prefect as a library: its state beside ours, no reports to its makers, quiet."""
    return QUIET_TOOLS | {
        "PREFECT_HOME": str(state_folder(workspace.path) / "prefect"),
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",  # 20 by default, too few on a busy machine
    }


def _register(workspace: Workspace, build_id: str, uri: str) -> dict[str, Any]:
    receipt = state_folder(workspace.path) / "registered" / f"{workspace.name}.json"
    evidence = read_json(workspace.path / "reports" / "gate.json")["evidence_sha256"]
    store = hashlib.sha256(uri.encode()).hexdigest()  # it may hold a password
    known = read_json(receipt) if receipt.is_file() else {}
    if (
        known.get("evidence") == evidence
        and known.get("store_sha256") == store
        and _still_registered(uri, known["registered"])
    ):
        return dict(known["registered"])
    os.environ.update(QUIET_TOOLS)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    from tasks.register import register

    registered = asdict(register(workspace, build_id))
    write_json(receipt, {"evidence": evidence, "store_sha256": store, "registered": registered})
    return registered


def _still_registered(uri: str, registered: Mapping[str, Any]) -> bool:
    """Look into the embedded store without importing MLflow; for any other, say no and let MLflow look."""
    database = sqlite_file(uri)
    if database is None:
        return False
    question = "select count(*) from model_versions where name = ? and version = ? and current_stage != ?"
    answer = (registered["name"], registered["version"], "Deleted_Internal")
    try:
        with reading(database) as connection:
            return bool(connection.execute(question, answer).fetchone()[0])
    except sqlite3.Error:
        return False


def _wait_for_tracking(workspace: Workspace, build_id: str, uri: str) -> None:
    if not wait_until_written(spool_folder(workspace.path, build_id), _WRITER_GRACE_S):
        print(
            f"warning: MLflow at {shown(uri)} has not all of this build's runs yet; "
            "the next build sends the rest",
            file=sys.stderr,
        )
