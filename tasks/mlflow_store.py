"""What edgeloop keeps in MLflow: an experiment a workspace, a run a build, below it a run a stage.

Importing this module imports MLflow, which takes seconds.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tasks.mlflow_file import registered_name

T = TypeVar("T")

_LOCKED_FOR_AT_MOST_S = 45.0
_RETRY_S = 0.3


class Store:
    """MLflow's client, patient with a store that another writer holds."""

    def __init__(self, uri: str, folder: Path) -> None:
        """Open the store at `uri`; the embedded one keeps its artifacts in `folder`."""
        self.uri, self.folder = uri, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / "mlflow.lock")
        with self._lock:  # two first openings at once would both create the tables
            self.client = MlflowClient(uri)
            self.call(lambda: self.client.search_experiments(max_results=1))

    def call(self, action: Callable[[], T]) -> T:
        """Run `action`, again while the store is locked, within a limit."""
        deadline = time.monotonic() + _LOCKED_FOR_AT_MOST_S
        while True:
            try:
                return action()
            except MlflowException as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)

    def experiment(self, workspace: str) -> str:
        """The id of a workspace's experiment, created or undeleted when needed."""
        name = registered_name(workspace)
        with self._lock:
            found = self.client.get_experiment_by_name(name)
            if found is None:
                embedded = self.uri.startswith("sqlite")
                location = (self.folder / "mlartifacts" / name).as_uri() if embedded else None
                return str(self.client.create_experiment(name, artifact_location=location))
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)

    def parent_run(self, workspace: str, build_id: str, *, started_ms: int | None = None) -> str:
        """The id of a build's run, created when this is its first stage."""
        experiment = self.experiment(workspace)
        with self._lock:
            query = f"tags.build_id = '{build_id}' and tags.kind = 'build'"
            found = self.call(lambda: self.client.search_runs([experiment], query, max_results=1))
            if found:
                return str(found[0].info.run_id)
            tags = {"build_id": build_id, "kind": "build", "workspace": workspace}
            run = self.call(lambda: self.client.create_run(experiment, started_ms, tags, build_id))
            return str(run.info.run_id)
