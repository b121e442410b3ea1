"""What the stages tell MLflow. Placeholder surface, see docs/architecture.md: stage_run, Run.metrics, Run.artifact."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Run:
    """One stage's run."""

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Log numbers, at `step` for curves."""

    def artifact(self, path: Path) -> None:
        """Attach a file."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags."""


@contextlib.contextmanager
def stage_run(name: str, params: Mapping[str, Any]) -> Iterator[Run]:
    """The nested run of one stage under its build's parent run."""
    del name, params
    yield Run()
