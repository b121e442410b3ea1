"""What the tests of the review do in a repository, and look at."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from tasks.review import acts
from tasks.review.author import Author
from tasks.review.ledger import Draft, Entry, Ledger
from tasks.review.release import ATTACHED
from tasks.workspace import Workspace

MODEL = "edgeloop-tiny"
ADA = Author(name="Ada", source="--by")


class Room:
    """A repository with versions under review."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.path = repository / "presets" / "tiny"
        self.workspace = Workspace(name="tiny", path=self.path, repository=repository)
        self.ledger = Ledger(repository / ".edgeloop")

    @cached_property
    def client(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.repository / '.edgeloop' / 'mlflow.db'}")

    def approve(self, version: int, why: str = "good", who: Author = ADA) -> acts.Done:
        return acts.act(self.repository, "approved", MODEL, version, who=who, why=why)

    def reject(self, version: int, why: str = "bad", who: Author = ADA) -> acts.Done:
        return acts.act(self.repository, "rejected", MODEL, version, who=who, why=why)

    def set_tag(self, version: int, **tags: str) -> None:
        """As somebody does in MLflow's pages."""
        for key, value in tags.items():
            self.client.set_model_version_tag(MODEL, str(version), key, value)

    def tags(self, version: int) -> dict[str, str]:
        return dict(self.client.get_model_version(MODEL, str(version)).tags)

    @property
    def aliases(self) -> dict[str, int]:
        return {k: int(v) for k, v in self.client.get_registered_model(MODEL).aliases.items()}

    @property
    def states(self) -> dict[int, str]:
        """Version to state, as `edgeloop release list` says, which reconciles."""
        return {row.version: row.state for row in acts.rows(self.repository).rows}

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.ledger.read().entries

    def said(self, since: int = 0) -> list[tuple[Any, ...]]:
        """The ledger in short: action, alias, version."""
        return [(e.action, e.alias, e.version) for e in self.entries[since:]]

    def artifact(self, version: int, name: str) -> Path:
        """A file of a version's release on the disk of the embedded store."""
        source = self.client.get_model_version(MODEL, str(version)).source
        return Path(source.removeprefix("file://")) / name

    def replace(self, version: int, name: str, content: bytes | None) -> None:
        """Change an artifact behind MLflow's back, or take it away."""
        path = self.artifact(version, name)
        path.unlink()
        if content is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    def ledger_registers(self, version: int) -> None:
        """Write to the ledger that a version was registered, with the hashes of its tags."""
        tags, found = self.tags(version), self.client.get_model_version(MODEL, str(version))
        attached = {key: tags[key] for key in ATTACHED if key in tags}
        hashes = {key: tags[key] for key in ("evidence_sha256", "release_sha256")}
        draft = Draft(
            action="registered", name=MODEL, version=version, run_id=found.run_id, files=attached, **hashes
        )
        self.ledger.append([draft])

    def environment(self) -> dict[str, str]:
        """For a child that runs this code on this repository."""
        code = str(Path(acts.__file__).resolve().parents[2])
        return dict(os.environ) | {"PYTHONPATH": code}
