"""The champion of a workspace as its builds see it: the folder `champion/`, tracked by git."""

from pathlib import Path
from typing import Any

from fleet.device.errors import UserError
from tasks.review.release import Release, sha256_of
from tasks.review.standing import CHAMPION, Standing
from tasks.stage import read_json, write_json

FOLDER = "champion"
_RECORD, _PREDICTIONS = "champion.json", "predictions.parquet"


def crown(workspace: Path, release: Release | None) -> None:
    """Write the champion, or that there is none. The record comes last: it names the predictions' bytes."""
    folder = workspace / FOLDER
    folder.mkdir(exist_ok=True)
    if release is None:
        write_json(folder / _RECORD, {})
        (folder / _PREDICTIONS).unlink(missing_ok=True)
        return
    temporary = folder / f".{_PREDICTIONS}"
    temporary.write_bytes(release.predictions.read_bytes())
    temporary.replace(folder / _PREDICTIONS)
    write_json(folder / _RECORD, _record(release))


def is_crowned(workspace: Path, name: str, now: Standing) -> bool:
    """Whether the folder shows the ledger's champion; what a ledger without champions finds there stays."""
    version = now.aliases.get(CHAMPION)
    if not now.crowns:
        return True
    try:
        record = read_json(workspace / FOLDER / _RECORD)
        if version is None:
            return bool(record == {})
        decided = now.review(version).decided
        evidence = decided.evidence_sha256 if decided else ""
        same = (record["name"], record["version"], record["evidence_sha256"]) == (name, version, evidence)
        return same and bool(record["predictions_sha256"] == sha256_of(workspace / FOLDER / _PREDICTIONS))
    except (UserError, OSError, KeyError, TypeError):
        return False


def _record(release: Release) -> dict[str, Any]:
    cards, parity = release.cards, read_json(release.folder / "parity.json")
    return {
        "name": release.name,
        "version": release.version,
        "release_sha256": release.release_sha256,
        "evidence_sha256": release.evidence_sha256,
        "git_commit": release.git_commit,
        "labels": next(iter(cards.values()))["labels"] if cards else [],
        "variants": {
            name: {
                "mnn_sha256": card["mnn_sha256"],
                "size_bytes": card["size_bytes"],
                "top1": parity.get(f"{name}/top1"),
            }
            for name, card in cards.items()
        },
        "predictions_sha256": sha256_of(release.predictions),
    }
