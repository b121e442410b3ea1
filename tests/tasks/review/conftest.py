"""A repository under review: three versions of the tiny build, each registered with evidence of its own."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from clones import TinyBuild
from review_room import Room

from tasks.gate import GateParams, gate
from tasks.register import register
from tasks.stage import load_params, write_json
from tasks.workspace import Workspace

_MOVED = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def _relocate(repository: Path, before: Path) -> None:
    """Make a copied embedded store lead to its own artifacts."""
    with sqlite3.connect(repository / ".edgeloop" / "mlflow.db") as connection:
        for table, column in _MOVED:
            question = f"update {table} set {column} = replace({column}, ?, ?)"
            connection.execute(question, (str(before), str(repository)))
    connection.close()


def _copy(source: Path, target: Path) -> Path:
    """Copy a repository's store, ledger and tiny workspace; artifacts are hard links: replace, never edit."""
    (target / ".dvc").mkdir(parents=True)
    (target / "tasks").mkdir()
    (target / "tasks" / "stage.py").touch()  # by this the command line knows a repository of edgeloop
    shutil.copytree(
        source / ".edgeloop" / "mlartifacts", target / ".edgeloop" / "mlartifacts", copy_function=os.link
    )
    for name in ("mlflow.db", "ledger.jsonl"):
        shutil.copy2(source / ".edgeloop" / name, target / ".edgeloop" / name)
    ignored = shutil.ignore_patterns("data", "data_docs", "train", "prune", "quantize", "export")
    tiny = Path("presets") / "tiny"
    shutil.copytree(source / tiny, target / tiny, ignore=ignored, symlinks=True)
    _relocate(target, source)
    return target


@pytest.fixture(scope="module")
def _three_versions(tiny_build: TinyBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = _copy(tiny_build.clone, tmp_path_factory.mktemp("review") / "repository")
    path = repository / "presets" / "tiny"
    workspace = Workspace(name="tiny", path=path, repository=repository)
    for number, size_mb in ((2, 9.0), (3, 8.0)):
        params = load_params("gate", GateParams, path).model_copy(update={"max_size_mb": size_mb})
        write_json(path / "reports" / "gate.json", gate(path, params))
        assert register(workspace, f"build-{number}").version == number
    return repository


@pytest.fixture
def room(_three_versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """A copy of its own for each test; versions 1 to 3 wait, 3 is the candidate."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Room(_copy(_three_versions, tmp_path / "repository"))


@pytest.fixture
def copy_room(tmp_path: Path) -> Callable[[Room, str], Room]:
    """Copies a room as it is now."""
    return lambda room, name: Room(_copy(room.repository, tmp_path / name))
