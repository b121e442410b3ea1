"""The frame of every stage: params section in, report out, errors as exit codes, an MLflow run beside it.

A stage module is a pure function plus

    def main() -> None:
        with stage("train", TrainParams) as run:
            run.report(train(run.params, ...))

The working directory is the workspace: the folder that holds params.yaml and dvc.yaml.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from fleet.device.errors import EdgeloopError, UserError
from tasks import tracking
from tasks.workspace import check_environment, only_process


class Params(BaseModel):
    """Base of every stage's params section: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


P = TypeVar("P", bound=Params)

REPORTS = Path("reports")
FAILURE_FILE = "EDGELOOP_FAILURE_FILE"
"""Environment variable: where the build wants to read why a stage failed; DVC passes no exit code on."""


def load_params(section: str, model: type[P], workspace: Path = Path()) -> P:
    """Read one section of the workspace's params.yaml.

    Raises:
        UserError: the file is missing or not YAML, the section is missing, or a value is not allowed.
    """
    path = workspace / "params.yaml"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: {error}",
            allowed="a workspace folder with a params.yaml",
            next_step="run from a workspace, or make one with `edgeloop init NAME DIR`",
        ) from error
    if not isinstance(document, dict) or section not in document:
        raise UserError(
            f"{path} has no section `{section}`",
            allowed=f"a mapping with a section for each stage, `{section}` among them",
            next_step=f"copy the section `{section}` from the params.yaml at the repository's root",
        )
    try:
        return model.model_validate(document[section] or {})
    except ValidationError as error:
        lines = "; ".join(
            f"{section}.{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}"
            for e in error.errors()
        )
        raise UserError(
            f"{path}: {lines}",
            allowed=f"the fields of {model.__name__}: {', '.join(model.model_fields)}",
            next_step=f"edit {path}",
        ) from error


class Stage(Generic[P]):
    """What a stage sees of its frame: its params, its run, and where the report goes."""

    def __init__(self, name: str, params: P, run: tracking.Run) -> None:
        self.name, self.params, self.run = name, params, run

    def report(self, values: Mapping[str, Any], *, file: Path | None = None) -> None:
        """Write reports/<stage>.json (sorted, flat keys with units) and log its numbers as metrics."""
        path = file or REPORTS / f"{self.name}.json"
        write_json(path, values)
        self.run.metrics({k: v for k, v in values.items() if isinstance(v, int | float)})
        self.run.artifact(path)


@contextlib.contextmanager
def stage(name: str, model: type[P], *, section: str | None = None) -> Iterator[Stage[P]]:
    """Run a stage body: errors become one message on stderr and exit code 2 (user) or 3 (engine)."""
    try:
        check_environment()
        params = load_params(section or name, model)
        with only_process(name), tracking.stage_run(name, params.model_dump(mode="json")) as run:
            yield Stage(name, params, run)
    except EdgeloopError as error:
        print(f"{name}: {error}", file=sys.stderr)
        if failure_file := os.environ.get(FAILURE_FILE):
            write_json(Path(failure_file), {"exit_code": error.exit_code, "error": str(error)})
        raise SystemExit(error.exit_code) from error


def write_json(path: Path, values: Any) -> None:
    """Write JSON that is the same bytes for the same values; NaN and infinity are refused."""
    write_text(path, json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file that an earlier stage wrote.

    Raises:
        UserError: it is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: {error}",
            allowed="the JSON an earlier stage wrote",
            next_step="run `dvc repro` so that the stage before this one writes it",
        ) from error
