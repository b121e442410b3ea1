"""The champion of a workspace as its builds see it: the folder `champion/`, tracked by git."""

from pathlib import Path

from fleet.device.errors import UserError
from tasks.champion_files import FOLDER, PREDICTIONS, RECORD
from tasks.provenance import sha256_of
from tasks.review.release import Release
from tasks.review.standing import CHAMPION, Standing
from tasks.stage import read_json


def crown(workspace: Path, release: Release | None) -> None:
    """Write the champion, or that there is none."""
    from tasks.champion import Champion, ChampionVariant, write_champion  # numpy: only a change imports it

    if release is None:
        write_champion(workspace / FOLDER)
        return
    cards, parity = release.cards, read_json(release.folder / "parity.json")
    variants = {
        name: ChampionVariant(
            mnn_sha256=card["mnn_sha256"], size_bytes=card["size_bytes"], top1=parity.get(f"{name}/top1")
        )
        for name, card in cards.items()
    }
    champion = Champion(
        name=release.name,
        version=release.version,
        release_sha256=release.release_sha256,
        evidence_sha256=release.evidence_sha256,
        git_commit=release.git_commit,
        labels=tuple(next(iter(cards.values()))["labels"]),
        variants=variants,
        predictions_sha256=sha256_of(release.predictions),
    )
    write_champion(workspace / FOLDER, champion, release.predictions)


def is_crowned(workspace: Path, name: str, now: Standing) -> bool:
    """Whether the folder shows the ledger's champion; what a ledger without champions finds there stays."""
    version = now.aliases.get(CHAMPION)
    if not now.crowns:
        return True
    try:
        record = read_json(workspace / FOLDER / RECORD)
        if version is None:
            return bool(record == {})
        decided = now.review(version).decided
        evidence = decided.evidence_sha256 if decided else ""
        same = (record["name"], record["version"], record["evidence_sha256"]) == (name, version, evidence)
        return same and bool(record["predictions_sha256"] == sha256_of(workspace / FOLDER / PREDICTIONS))
    except (UserError, OSError, KeyError, TypeError):
        return False
