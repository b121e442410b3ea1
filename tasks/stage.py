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
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from fleet.device.errors import INTERRUPTED, EdgeloopError, EngineError, UserError
from tasks import tracking
from tasks.workspace import check_environment, disk_full, only_process


class Params(BaseModel):
    """Base of every stage's params section: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _yes_is_no_number(cls, section: Any) -> Any:
        """YAML's yes, no, on and off are booleans, and pydantic would take them for 1 and 0."""
        for name, value in section.items() if isinstance(section, dict) else ():
            kind = cls.model_fields[name].annotation if name in cls.model_fields else None
            wanted = {kind, *get_args(kind)}
            if wanted & {int, float} and isinstance(value, bool | str) and type(value) not in wanted:
                raise ValueError(f"{name} is {value!r}, which is no number (yes, no, on and off neither)")
        return section


P = TypeVar("P", bound=Params)

REPORTS = Path("reports")
SECONDS = REPORTS / "measured" / "seconds"
"""How long each stage computed, a file a stage; measured, so no out of the graph."""
FAILURE_FILE = "EDGELOOP_FAILURE_FILE"
"""Environment variable: where the build wants to read why a stage failed; DVC passes no exit code on."""


def read_params(workspace: Path = Path()) -> dict[str, Any]:
    """The workspace's params.yaml.

    Raises:
        UserError: the file is missing, cannot be read, or is no YAML mapping.
    """
    path = workspace / "params.yaml"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        yaml.YAMLError,
        RecursionError,
    ) as error:  # ValueError: no UTF-8, no such date
        raise UserError(
            f"{path}: {' '.join(str(error).split())}",
            allowed="a workspace folder with a params.yaml that is YAML in UTF-8",
            next_step="mend the line named, or run from a workspace; `edgeloop init NAME DIR` makes one",
        ) from error
    if not isinstance(document, dict):
        raise UserError(
            f"{path} has no section at all but {type(document).__name__}: {str(document)[:40]!r}",
            allowed="a mapping with a section for each stage",
            next_step="copy the sections from the params.yaml at the repository's root",
        )
    return document


def load_params(section: str, model: type[P], workspace: Path = Path()) -> P:
    """Read one section of the workspace's params.yaml.

    Raises:
        UserError: the file is missing or not YAML, the section is missing, or a value is not allowed.
    """
    path, document = workspace / "params.yaml", read_params(workspace)
    if section not in document:
        raise UserError(
            f"{path} has no section `{section}`",
            allowed=f"a mapping with a section for each stage, `{section}` among them",
            next_step=f"copy the section `{section}` from the params.yaml at the repository's root",
        )
    try:
        return model.model_validate({} if document[section] is None else document[section])
    except ValidationError as error:
        lines = "; ".join(
            f"{section}.{'.'.join(map(str, e['loc']))}: {e['msg']}, got {str(e['input'])[:80]!r}"
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
    """Run a stage body: errors become one message on stderr and exit code 2 (user) or 3 (engine).

    How long the body took goes to reports/measured/seconds: what else a build takes is overhead.
    """
    try:
        check_environment()
        params = load_params(section or name, model)
        with only_process(name), tracking.stage_run(name, params.model_dump(mode="json")) as run:
            started, cpu = time.monotonic(), _cpu_s()
            yield Stage(name, params, run)
            took = {"seconds": time.monotonic() - started, "cpu_seconds": _cpu_s() - cpu}
            write_json(SECONDS / f"{name}.json", {key: round(value, 3) for key, value in took.items()})
    except EdgeloopError as error:
        _end(name, error)
    except KeyboardInterrupt:  # a terminal interrupts the build, too, which says so
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:  # a bug, unless the disk is full: libraries call that by many names
        if full := disk_full(error, Path()):
            _end(name, full)
        _leave_word(EngineError(f"{type(error).__name__}: {error}; its traceback stands above"))
        raise


def _cpu_s() -> float:
    """Seconds of CPU of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _end(name: str, error: EdgeloopError) -> NoReturn:
    if not _leave_word(error):
        print(f"{name}: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from error


def _leave_word(error: EdgeloopError) -> bool:
    """Tell the build, when one runs this stage, why it failed: it prints that. False: it was not told."""
    failure_file = os.environ.get(FAILURE_FILE)
    if failure_file is None:
        return False
    try:
        write_json(Path(failure_file), {"exit_code": error.exit_code, "error": str(error)})
    except OSError:  # no room for that either
        return False
    return True


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
    except (OSError, ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(
            f"{path}: {what}",
            allowed="the JSON an earlier stage wrote",
            next_step="run `dvc repro` so that the stage before this one writes it",
        ) from error
