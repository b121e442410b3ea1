"""Deciding on a version: verified first, then written to the ledger, then shown in MLflow."""

from dataclasses import replace
from typing import Literal

from tasks.mlflow_file import Snapshot
from tasks.review.author import Author
from tasks.review.champion_folder import RECORD_SHA256, crown, record_of, record_sha256
from tasks.review.desk import Desk
from tasks.review.release import ReleaseRefusedError, require_version
from tasks.review.standing import CHAMPION, Standing

Decision = Literal["approved", "rejected"]


def decide(desk: Desk, decision: Decision, version: int, who: Author, why: str) -> None:
    """Carry a decision out, or write down why it was refused.

    An approved version becomes champion. A rejected one loses its aliases: a champion's place falls to the
    one before. A rejection stays, so two reviewers who disagree end with a rejection whoever is first.

    Raises:
        ReleaseRefusedError: the version may not be approved, or is not there; it is in the ledger.
    """
    _, now, shown = desk.look()
    try:
        _require_possible(desk.name, decision, version, now, shown)
        if decision == "approved":
            with desk.fetched(version) as release:
                record = record_of(release)  # before the ledger has it: an approved version can be champion
                files = {RECORD_SHA256: record_sha256(record.model_dump(mode="json"))}
                reason = replace(desk.draft("approved", version, who, why), files=files)
                desk.write([reason])
                desk.promote(version, reason)
                crown(desk.workspace.path, record, release)
        else:
            reason = desk.draft("rejected", version, who, why)
            desk.write([reason, *desk.dethrone(version, reason)])
    except ReleaseRefusedError as error:
        desk.write([desk.draft("refused", version, who, error.got)])
        desk.settle()
        raise
    desk.settle()


def _require_possible(name: str, decision: Decision, version: int, now: Standing, shown: Snapshot) -> None:
    require_version(name, version, shown)
    review = now.review(version)
    done = review.decided
    if done is None:
        return
    said = f"by {done.by} at {done.time}: {done.why}"
    if review.state == "rejected":
        raise ReleaseRefusedError(
            f"{name} version {version} was rejected {said}",
            allowed="a version that nobody has rejected",
            next_step="build a better one; or delete this version in MLflow and `edgeloop build`, which "
            "registers the build anew, to be reviewed again",
        )
    if decision == "approved" and now.aliases.get(CHAMPION) == version:
        raise ReleaseRefusedError(
            f"{name} version {version} is the champion already; approved {said}",
            allowed="a version that is not",
            next_step="nothing is left to do",
        )
