"""The child that carries a build's spooled messages to MLflow.

    MLFLOW_TRACKING_URI=... python -m tasks.tracking_writer FOLDER OWNER

FOLDER holds one file a stage, JSON lines:

    {"stage", "params", "build_id", "workspace", "address", "origin", "process", "time_ms"}    first
    {"metrics", "step", "time_ms"} | {"artifact"} | {"tags"}                         any number
    {"status", "time_ms"}                                                 last; missing: it was killed

beside them copies of the artifacts, and the tags over what the stage read (`tasks/tracking.py` says where).
Nothing here is looked up when it is delivered: by then it may have changed.

OWNER is the process that runs the build, as [id, start time]; the writer ends after it, when all is written.
A file that could not be delivered stays, with how far it got, for the writer of a later build.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from tasks.mlflow_store import Store
from tasks.tracking import copies_of, inputs_of, is_alive, sole_writer, stage_name
from tasks.workspace import workspace_name

_POLL_S = 0.3
_GRACE_S = 30.0
"""How long a store that fails is tried again after the build has ended."""
_BATCH = 1000
"""Most metrics MLflow takes in one call."""
_VALUE_LIMIT = 5000


class StageFile:
    """One stage's file on its way to MLflow."""

    def __init__(self, path: Path) -> None:
        """Take the file up where an earlier writer left it."""
        self.path, self._state = path, path.with_suffix(".state")
        with path.open(encoding="utf-8") as lines:
            self.opening: dict[str, Any] = json.loads(lines.readline())
        if self._state.exists():
            self.state: dict[str, Any] = json.loads(self._state.read_text(encoding="utf-8"))
        else:
            self._save(offset=0, artifacts=[])

    def _save(self, **state: Any) -> None:
        self.state = state
        temporary = self._state.with_suffix(".part")
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(self._state)

    def deliver(self, store: Store) -> bool:
        """Send what is new; True when the stage has ended and all of it is sent."""
        alive = is_alive(self.opening["process"])  # asked before reading: what it wrote last is not missed
        messages, offset = self._new_messages()
        if "run_id" not in self.state:
            self._save(**self.state, **self._create_run(store))
        artifacts = [*self.state["artifacts"], *(m["artifact"] for m in messages if "artifact" in m)]
        end = next((m for m in messages if "status" in m), self.state.get("end"))
        self._write(store, messages)
        self._save(**self.state | {"offset": offset, "artifacts": artifacts, "end": end})
        if end is None and alive:
            return False
        self._end(store, end or {"status": "KILLED", "time_ms": None})
        return True

    def _new_messages(self) -> tuple[list[dict[str, Any]], int]:
        with self.path.open("rb") as file:
            file.seek(self.state["offset"])
            whole, _, _ = file.read().rpartition(b"\n")  # a killed stage may leave half a line
        if not whole:
            return [], self.state["offset"]
        messages = [message for line in whole.split(b"\n") if (message := _parsed(line)) is not None]
        return messages, self.state["offset"] + len(whole) + 1

    def _create_run(self, store: Store) -> dict[str, str]:
        o, workspace = self.opening, workspace_name(Path(self.opening["workspace"]))
        parent = store.parent_run(workspace, o["build_id"], started_ms=o["time_ms"])
        tags = {"mlflow.parentRunId": parent, "kind": "stage", "stage": o["stage"], "workspace": workspace}
        tags |= {"build_id": o["build_id"], "dvc_stage": stage_name(o["address"])} | o.get("origin", {})
        experiment = store.experiment(workspace)
        run = store.call(
            lambda: store.client.create_run(
                experiment, start_time=o["time_ms"], tags=tags, run_name=o["stage"]
            )
        )
        return {"run_id": str(run.info.run_id), "parent_id": parent}

    def _write(self, store: Store, messages: list[dict[str, Any]]) -> None:
        """Write messages in as few calls as MLflow allows."""
        metrics, params, tags = [], [], []
        for message in messages:
            values, step = message.get("metrics", {}), message.get("step", 0)
            metrics += [Metric(key, value, message["time_ms"], step) for key, value in values.items()]
            params += [Param(k, v[:_VALUE_LIMIT]) for k, v in message.get("params", {}).items()]
            tags += [RunTag(k, v[:_VALUE_LIMIT]) for k, v in message.get("tags", {}).items()]
        client, run_id = store.client, self.state["run_id"]
        for start in range(0, len(metrics), _BATCH):
            part = metrics[start : start + _BATCH]
            store.call(lambda part=part: client.log_batch(run_id, metrics=part))  # type: ignore[misc]  # mypy infers no lambda with a default
        if params or tags:
            store.call(lambda: client.log_batch(run_id, params=params, tags=tags))

    def _end(self, store: Store, end: dict[str, Any]) -> None:
        """Attach what is kept and close the run; a build's status is that of the stage that ended last."""
        client, run_id = store.client, self.state["run_id"]
        tags = [RunTag(key, value) for key, value in self._inputs().items()]
        store.call(lambda: client.log_batch(run_id, tags=tags))
        for path in self.state["artifacts"]:
            if Path(path).is_file():
                store.call(lambda path=path: client.log_artifact(run_id, path))  # type: ignore[misc]  # as above
        for run in (run_id, self.state["parent_id"]):
            store.call(lambda run=run: client.set_terminated(run, end["status"], end["time_ms"]))  # type: ignore[misc]  # as above
        shutil.rmtree(copies_of(self.path), ignore_errors=True)
        for file in (inputs_of(self.path), self.path, self._state):
            file.unlink(missing_ok=True)

    def _inputs(self) -> dict[str, str]:
        """Tags over what the stage read; none without DVC, or when the stage was killed as it began."""
        try:
            tags: dict[str, str] = json.loads(inputs_of(self.path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return tags


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        message: dict[str, Any] = json.loads(line)
    except ValueError:  # torn by a full disk; what came after it still counts
        print(f"a line cannot be read and was left out: {line[:80]!r}", flush=True)
        return None
    return message


class Spool:
    """The files of one build's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, StageFile] = {}

    def pending(self) -> list[Path]:
        """Files with something to send, oldest first."""
        return sorted(self.folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)

    def take_up(self) -> None:
        """Open the files of stages that are new."""
        for path in self.pending():
            if path in self._files or not path.stat().st_size:
                continue
            try:
                self._files[path] = StageFile(path)
            except ValueError as error:  # torn by a full disk: one file must not hold back the others
                print(f"{path.name} cannot be read and was set aside as .bad: {error}", flush=True)
                path.replace(path.with_suffix(".bad"))

    def deliver(self, store: Store) -> None:
        """Send all there is."""
        self.take_up()
        for path, file in list(self._files.items()):
            if file.deliver(store):
                del self._files[path]  # at once: the next one may fail


def carry(spool: Spool, uri: str, owner: list[float], *, grace_s: float = _GRACE_S) -> None:
    """Deliver until the owner has ended and nothing is left, or the store fails for too long after that."""
    spool.take_up()
    store, give_up_at = None, float("inf")
    while is_alive(owner) or spool.pending():
        try:
            store = store or Store(uri, spool.folder.parent.parent)  # .edgeloop/spool/BUILD
            spool.deliver(store)
        except (MlflowException, OSError) as error:
            print(f"{time.strftime('%H:%M:%S')} not delivered, trying again: {error}", flush=True)
            if not is_alive(owner):
                give_up_at = min(give_up_at, time.monotonic() + grace_s)
                if time.monotonic() >= give_up_at:
                    return
        time.sleep(_POLL_S)
    for leftover in ("writer.log", "writer.lock"):
        (spool.folder / leftover).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: another process works for a build of the same id
        spool.folder.rmdir()


def main() -> None:
    """Carry this build's messages, then those that earlier builds had to leave."""
    folder, uri, owner = Path(sys.argv[1]), os.environ["MLFLOW_TRACKING_URI"], json.loads(sys.argv[2])
    left = [other for other in folder.parent.iterdir() if other != folder and other.is_dir()]
    for each, lives_for in [(folder, owner), *((other, [0.0, 0.0]) for other in left)]:
        if each.is_dir():
            with sole_writer(each) as mine:
                if mine:
                    carry(Spool(each), uri, lives_for)


if __name__ == "__main__":
    main()
