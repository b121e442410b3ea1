"""MLflow's embedded store read as the SQLite file it is: importing MLflow to look into it takes seconds.

Whoever changes something goes through MLflow's client (`tasks/mlflow_store.py`). The tables are those of the
MLflow that requirements.lock pins.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.tracking import reading

_PREFIX = "edgeloop-"
_DELETED = "Deleted_Internal"
"""MLflow's stage of a version that was deleted; its row stays."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version as MLflow shows it."""

    run_id: str
    tags: Mapping[str, str]
    source: str = ""
    """Where who resolves the version finds its files."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A registered model as MLflow shows it; empty when there is none."""

    versions: Mapping[int, Version] = field(default_factory=dict)
    aliases: Mapping[str, int] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def registered_name(workspace: str) -> str:
    """What the registered model of a workspace is called, and its experiment."""
    return f"{_PREFIX}{workspace}"


def workspace_of(name: str) -> str:
    """The workspace of a registered model, which may be called by either name."""
    return name.removeprefix(_PREFIX)


def snapshot(database: Path, name: str) -> Snapshot:
    """A registered model.

    Raises:
        sqlite3.Error: the file is not as MLflow makes it, or another process holds it.
    """
    model = {"name": name, "deleted": _DELETED}
    live = (
        "select version, run_id, source, storage_location from model_versions"
        " where name = :name and current_stage != :deleted"
    )
    tagged = "select version, key, value from model_version_tags where name = :name"
    aliased = "select alias, version from registered_model_aliases where name = :name"
    own = "select key, value from registered_model_tags where name = :name"
    found = _rows(database, model, live, tagged, aliased, own)
    runs = {int(version): str(run_id or "") for version, run_id, *_ in found[0]}
    sources = {  # MLflow follows the location where there is one, some clients the source
        int(version): str(source or "") if location in (None, source) else f"{source}, {location}"
        for version, _, source, location in found[0]
    }
    tags: dict[int, dict[str, str]] = {version: {} for version in runs}
    for version, key, value in found[1]:
        if int(version) in tags:
            tags[int(version)][key] = value
    return Snapshot(
        versions={n: Version(run_id=runs[n], tags=tags[n], source=sources[n]) for n in runs},
        aliases={alias: int(version) for alias, version in found[2]},
        tags=dict(found[3]),
    )


def artifact_uri(database: Path, run_id: str) -> str:
    """Where a run keeps its artifacts; empty when there is no such run.

    Raises:
        sqlite3.Error: as for `snapshot`.
    """
    question = "select artifact_uri from runs where run_uuid = :run_id"
    (found,) = _rows(database, {"run_id": run_id}, question)
    return str(found[0][0] or "") if found else ""


def version_exists(database: Path, name: str, version: int) -> bool:
    """Whether a registered model has this version.

    Raises:
        sqlite3.Error: as for `snapshot`.
    """
    question = (
        "select 1 from model_versions where name = :name and version = :version and current_stage != :deleted"
    )
    (found,) = _rows(database, {"name": name, "version": version, "deleted": _DELETED}, question)
    return bool(found)


def run_of(database: Path, build_id: str) -> tuple[str, str] | None:
    """Experiment and id of a build's run; None when it has none.

    Raises:
        sqlite3.Error: as for `snapshot`.
    """
    question = (
        "select runs.experiment_id, runs.run_uuid from runs"
        " join tags build on build.run_uuid = runs.run_uuid and build.key = 'build_id'"
        " and build.value = :build_id"
        " join tags kind on kind.run_uuid = runs.run_uuid and kind.key = 'kind' and kind.value = 'build'"
    )
    (found,) = _rows(database, {"build_id": build_id}, question)
    return (str(found[0][0]), str(found[0][1])) if found else None


def _rows(database: Path, values: Mapping[str, Any], *questions: str) -> list[list[Any]]:
    """What each question gives, all through one connection."""
    with reading(database) as connection:
        answers = []
        for question in questions:
            with closing(connection.execute(question, dict(values))) as cursor:
                answers.append(cursor.fetchall())
        return answers
