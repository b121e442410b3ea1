"""The champion of a workspace as its builds see it: the folder `champion/`, tracked by git."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.device.errors import UserError
from tasks.champion_files import FOLDER, PREDICTIONS, RECORD
from tasks.provenance import sha256_of
from tasks.review.release import Release, ReleaseRefusedError
from tasks.review.standing import CHAMPION, Standing
from tasks.stage import read_json

if TYPE_CHECKING:
    from tasks.champion import Champion


RECORD_SHA256 = "champion_sha256"
"""Among the hashes of an approval in the ledger: the record that it made."""


def record_sha256(record: Any) -> str:
    """SHA-256 of what champion.json says, however it is laid out."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def crown(workspace: Path, champion: "Champion", release: Release) -> None:
    """Write the champion with what it answered and was built with."""
    from tasks.champion import write_champion  # numpy: only a change imports it

    params = release.params if release.params.is_file() else None
    write_champion(workspace / FOLDER, champion, release.predictions, params)


def uncrown(workspace: Path) -> None:
    """Write that there is no champion."""
    from tasks.champion import write_champion

    write_champion(workspace / FOLDER)


def record_of(release: Release) -> "Champion":
    """The record of a release that is to be champion.

    Raises:
        ReleaseRefusedError: a card or report of it says too little.
    """
    try:
        return _record_of(release)
    except (UserError, KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        said = " ".join(str(error).split())[:200]
        raise ReleaseRefusedError(
            f"{release.name} version {release.version}: no champion can be made of its cards and reports: "
            f"{type(error).__name__} {said}",
            allowed="cards and a parity report as the stages write them",
            next_step="delete this version in MLflow and build: `edgeloop build` then registers a new one",
        ) from error


def _record_of(release: Release) -> "Champion":
    from tasks.champion import Champion, ChampionVariant

    cards, parity = release.cards, read_json(release.folder / "parity.json")
    variants = {
        name: ChampionVariant(
            mnn_sha256=card["mnn_sha256"], size_bytes=card["size_bytes"], top1=parity.get(f"{name}/top1")
        )
        for name, card in cards.items()
    }
    return Champion(
        name=release.name,
        version=release.version,
        release_sha256=release.release_sha256,
        evidence_sha256=release.evidence_sha256,
        git_commit=release.git_commit,
        labels=tuple(next(iter(cards.values()))["labels"]),
        variants=variants,
        predictions_sha256=sha256_of(release.predictions),
        params_sha256=sha256_of(release.params) if release.params.is_file() else "",
    )


def is_crowned(workspace: Path, name: str, now: Standing) -> bool:
    """Whether the folder shows the ledger's champion; what a ledger without champions finds there stays."""
    version = now.aliases.get(CHAMPION)
    if not now.crowns:
        return True
    try:
        record = read_json(workspace / FOLDER / RECORD)
        if version is None:
            return bool(record == {})
        review = now.review(version)
        evidence = review.decided.evidence_sha256 if review.decided else ""
        same = (record["name"], record["version"], record["evidence_sha256"]) == (name, version, evidence)
        approved = review.decided.files.get(RECORD_SHA256) if review.decided else None
        answered = review.registered.files.get("predictions_sha256") if review.registered else None
        known = approved in (None, record_sha256(record)) and answered in (None, record["predictions_sha256"])
        return (
            same
            and known
            and bool(record["predictions_sha256"] == sha256_of(workspace / FOLDER / PREDICTIONS))
        )
    except (UserError, OSError, KeyError, TypeError):
        return False
