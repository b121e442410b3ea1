"""What the ledger says of a model's versions now, and what MLflow should show therefore. Pure functions.

The ledger is the truth; tags and aliases in MLflow are its image. Where the two differ, either the image was
not finished (a crash) or somebody edited it: a request when the version still waits, else to be put back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tasks.review.ledger import Draft, Entry, Reading, full_mark

State = Literal["pending", "approved", "rejected", "refused"]

CHAMPION, PREVIOUS, CANDIDATE = "champion", "previous", "candidate"
MARK = "ledger"
"""Tag of the registered model: the last entry that its tags and aliases show."""
ENTRY = "review_entry"
"""Tag of a version: the entry that decided on it."""


@dataclass(frozen=True, kw_only=True)
class Review:
    """What the ledger says of one version."""

    state: State = "pending"
    decided: Entry | None = None
    """The entry that made the state what it is."""
    registered: Entry | None = None
    run_id: str = ""
    """Of the version the entries speak of; empty when none says so."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the ledger says of one registered model."""

    versions: Mapping[int, Review] = field(default_factory=dict)
    aliases: Mapping[str, int] = field(default_factory=dict)
    crowned: tuple[int, ...] = ()
    """Versions that were champion, the latest first, each once."""
    crowns: int = 0
    """How often the alias `champion` was moved or taken away."""
    unpromoted: tuple[int, ...] = ()
    """Approved and not champion since: a crash came between."""
    asked: tuple[Entry, ...] = ()
    """Decisions that wait for MLflow to answer."""
    last: Entry | None = None
    moved: int = 0
    """Number of the last entry that moved an alias."""

    def review(self, version: int) -> Review:
        """Of a version the ledger knows or not."""
        return self.versions.get(version, Review())


def standing(entries: Iterable[Entry], name: str) -> Standing:
    """Play the entries of one registered model through."""
    now = Standing()
    for entry in entries:
        if entry.name == name:
            now = replace(_after(now, entry), last=entry)
    return now


def _after(now: Standing, entry: Entry) -> Standing:
    if entry.action == "alias":
        return _moved(now, entry)
    if entry.version is None:
        return now
    version, review = entry.version, now.review(entry.version)
    match entry.action:
        case "registered" if review.run_id == entry.run_id:
            return _set(now, version, replace(review, registered=entry))
        case "registered":  # another version had the number
            return _set(_forgotten(now, version), version, Review(registered=entry, run_id=entry.run_id))
        case "approved" | "rejected":
            decided = replace(review, state=entry.action, decided=entry, run_id=entry.run_id or review.run_id)
            kept = tuple(number for number in now.unpromoted if number != version)
            waiting = (*kept, version) if entry.action == "approved" else kept
            return _answered(replace(_set(now, version, decided), unpromoted=waiting), version)
        case "refused":
            if entry.run_id and review.state in ("pending", "refused"):  # without a run there is no version
                refused = replace(review, state="refused", decided=entry, run_id=entry.run_id)
                now = _set(now, version, refused)
            return _answered(now, version)
        case "deleted":
            return _forgotten(now, version)
        case "asked":
            return replace(now, asked=(*now.asked, entry))
    return now


def _moved(now: Standing, entry: Entry) -> Standing:
    """After an alias was moved, or taken away."""
    aliases = _without(now.aliases, entry.alias)
    if entry.version is not None:
        aliases[entry.alias] = entry.version
    now = replace(now, aliases=aliases, moved=entry.sequence)
    if entry.alias != CHAMPION:
        return now
    if entry.version is None:
        return replace(now, crowns=now.crowns + 1)
    return replace(
        now,
        crowns=now.crowns + 1,
        crowned=(entry.version, *(number for number in now.crowned if number != entry.version)),
        unpromoted=tuple(number for number in now.unpromoted if number != entry.version),
    )


def _set(now: Standing, version: int, review: Review) -> Standing:
    return replace(now, versions={**now.versions, version: review})


def _answered(now: Standing, version: int) -> Standing:
    return replace(now, asked=tuple(entry for entry in now.asked if entry.version != version))


def _forgotten(now: Standing, version: int) -> Standing:
    """Without a version that is gone, whose number another one may have now."""
    return replace(
        now,
        versions={number: review for number, review in now.versions.items() if number != version},
        aliases={alias: number for alias, number in now.aliases.items() if number != version},
        crowned=tuple(number for number in now.crowned if number != version),
        unpromoted=tuple(number for number in now.unpromoted if number != version),
    )


def _without(aliases: Mapping[str, int], alias: str) -> dict[str, int]:
    return {key: value for key, value in aliases.items() if key != alias}


def promotion(now: Standing, version: int, reason: Draft) -> list[Draft]:
    """The aliases' moves that make `version` the champion; nothing when it is.

    Args:
        now: The standing before.
        version: Approved.
        reason: Whose `by`, `why` and hashes the moves carry.
    """
    champion = now.aliases.get(CHAMPION)
    if champion == version:
        return []
    moves = [_move(now, reason, CHAMPION, version)]
    if champion is not None:
        moves.append(_move(now, reason, PREVIOUS, champion))
    elif now.aliases.get(PREVIOUS) == version:
        moves.append(_move(now, reason, PREVIOUS, None))
    if now.aliases.get(CANDIDATE) == version:
        moves.append(_move(now, reason, CANDIDATE, None))
    return moves


def demotion(now: Standing, version: int, heir: int | None, reason: Draft) -> list[Draft]:
    """The aliases' moves when `version` may bear none any more.

    Args:
        now: The standing before.
        version: Rejected, or deleted.
        heir: Who becomes champion if `version` is; None leaves the model without one.
        reason: As for `promotion`.
    """
    moves, champion, previous = [], now.aliases.get(CHAMPION), now.aliases.get(PREVIOUS)
    if now.aliases.get(CANDIDATE) == version:
        moves.append(_move(now, reason, CANDIDATE, None))
    if champion == version:
        moves.append(_move(now, reason, CHAMPION, heir))
        champion = heir
    if previous is not None and previous in (version, champion):
        before = next((number for number in heirs(now, version) if number != champion), None)
        moves.append(_move(now, reason, PREVIOUS, before))
    return moves


def heirs(now: Standing, version: int) -> list[int]:
    """Who could follow `version` as champion, the latest champion first."""
    return [number for number in now.crowned if number != version and now.review(number).state == "approved"]


def _move(now: Standing, reason: Draft, alias: str, version: int | None) -> Draft:
    """One move, with the hashes of the version that the alias leads to afterwards."""
    known = now.review(version).decided if version is not None else None
    of = reason if version in (None, reason.version) or known is None else known
    return Draft(
        action="alias",
        name=reason.name,
        version=version,
        alias=alias,
        by=reason.by,
        by_source=reason.by_source,
        why=reason.why,
        evidence_sha256=of.evidence_sha256,
        release_sha256=of.release_sha256,
    )


def expected_tags(review: Review, reading: Reading) -> dict[str, str | None]:
    """The tags that a version must have in MLflow; None for one it must not have.

    A waiting version's `reviewed_by` and `review_reason` are its reviewer's, who may be filling them in.
    """
    tags: dict[str, str | None] = {"review_state": review.state}
    if review.registered:
        made = review.registered
        tags |= {"release_sha256": made.release_sha256, "evidence_sha256": made.evidence_sha256}
        tags |= {**made.files, **made.origin}
    if review.decided is None:
        return tags
    tags[ENTRY] = full_mark(reading, review.decided)
    if review.state == "refused":
        return tags | {"review_refusal": review.decided.why}
    return tags | {
        "reviewed_by": review.decided.by,
        "reviewed_at": review.decided.time,
        "review_reason": review.decided.why,
        "review_refusal": None,
    }


def model_state(now: Standing, versions: Iterable[int]) -> State:
    """The state that the model's own tag shows: something waits, or how its newest version stands."""
    states = {number: now.review(number).state for number in versions}
    return "pending" if "pending" in states.values() or not states else states[max(states)]
