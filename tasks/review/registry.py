"""A registered model as MLflow's client shows it, held against the ledger, and set."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fleet.device.errors import UserError
from tasks.mlflow_file import Snapshot, Version
from tasks.review.ledger import Reading, full_mark, marked_sequence
from tasks.review.standing import (
    CANDIDATE,
    CHAMPION,
    ENTRY,
    MARK,
    PREVIOUS,
    Standing,
    expected_tags,
    model_state,
)
from tasks.tracking import shown

if TYPE_CHECKING:
    from tasks.mlflow_store import Store

_PAGE = 200


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing in MLflow that is not as the ledger says."""

    kind: Literal["deleted", "decision", "edited", "alias"]
    """`decision`: a waiting version's `review_state` was set; `edited`: a tag that nobody may set was."""
    key: str
    """The tag or alias."""
    version: int | None = None
    found: str | None = None
    expected: str | None = None


def snapshot(store: "Store", name: str) -> Snapshot:
    """The model as MLflow's client tells it."""
    models = store.call(lambda: store.client.search_registered_models(f"name = '{name}'"))
    if not models:
        return Snapshot()
    versions, token = {}, None
    while True:
        page = store.call(
            lambda token=token: store.client.search_model_versions(  # type: ignore[misc]  # mypy infers no lambda with a default
                f"name = '{name}'", max_results=_PAGE, page_token=token
            )
        )
        for found in page:
            versions[int(found.version)] = Version(
                run_id=str(found.run_id or ""), tags=dict(found.tags), source=str(found.source or "")
            )
        token = page.token
        if not token:
            break
    aliases = {alias: int(version) for alias, version in models[0].aliases.items()}
    return Snapshot(versions=versions, aliases=aliases, tags=dict(models[0].tags))


def require_known(uri: str, name: str, now: Standing, seen: Snapshot, reading: Reading) -> None:
    """Refuse a store that has never seen this ledger: what is not in it was not deleted there.

    Args:
        uri: The store.
        name: The registered model.
        now: As the ledger has it.
        seen: As the store has it; empty where it has no such model.
        reading: The ledger.

    Raises:
        UserError: the ledger has versions of the model, and the store neither any of them nor its mark.
    """
    runs = {(number, version.run_id) for number, version in seen.versions.items()}
    ours = seen.tags.get(MARK, "").partition(":")[0] == reading.ledger_id
    if not now.versions or ours or any((n, r.run_id) in runs for n, r in now.versions.items()):
        return
    versions = ", ".join(map(str, sorted(now.versions)))
    raise UserError(
        f"MLflow at {shown(uri)} has never seen this ledger, which has version {versions} of {name}",
        allowed="the store that .edgeloop/ledger.jsonl was written with",
        next_step="unset MLFLOW_TRACKING_URI, or bring the store back from a copy. To begin anew without it "
        "move .edgeloop/ledger.jsonl away, too: champion/ stays what builds are held against",
    )


def differences(now: Standing, shown: Snapshot, reading: Reading) -> list[Difference]:
    """What MLflow shows that the ledger does not say and that is no unfinished image of it."""
    applied = marked_sequence(shown.tags.get(MARK, ""), reading)
    found = [
        Difference(kind="deleted", key="version", version=number)
        for number, review in now.versions.items()
        if number not in shown.versions or review.run_id not in ("", shown.versions[number].run_id)
    ]
    gone = {difference.version for difference in found}
    for number, version in sorted(shown.versions.items()):
        if number not in gone:
            found += _tag_differences(now, number, version, reading, applied)
    if applied >= now.moved:
        found += [
            Difference(
                kind="alias",
                key=alias,
                version=shown.aliases.get(alias),
                found=_text(shown.aliases.get(alias)),
                expected=_text(now.aliases.get(alias)),
            )
            for alias in (CHAMPION, PREVIOUS, CANDIDATE)
            if shown.aliases.get(alias) != now.aliases.get(alias) and now.aliases.get(alias) not in gone
        ]
    return found


def _tag_differences(
    now: Standing, number: int, shown: Version, reading: Reading, applied: int
) -> list[Difference]:
    review, found = now.review(number), shown.tags.get("review_state")
    unfinished = review.decided is not None and review.decided.sequence > applied
    elsewhere = shown.tags.get(ENTRY, "").partition(":")[0] not in ("", reading.ledger_id)
    waits = review.state in ("pending", "refused")
    unseen = elsewhere or unfinished  # who set the tag was not shown our decision
    if (
        (waits and found == "rejected")
        or (waits and found == "approved" and not unfinished)
        or (unseen and review.state == "approved" and found == "rejected")
    ):
        return [
            Difference(
                kind="decision", key="review_state", version=number, found=found, expected=review.state
            )
        ]
    if unfinished or (elsewhere and found == review.state):
        return []
    return [
        Difference(kind="edited", key=key, version=number, found=shown.tags.get(key), expected=value)
        for key, value in expected_tags(review, reading).items()
        if shown.tags.get(key) != value
    ]


def is_shown(now: Standing, shown: Snapshot, reading: Reading) -> bool:
    """Whether MLflow was told of the last entry that concerns the model."""
    return now.last is None or marked_sequence(shown.tags.get(MARK, ""), reading) >= now.last.sequence


def show(store: "Store", name: str, now: Standing, shown: Snapshot, reading: Reading) -> None:
    """Make tags and aliases in MLflow what the ledger says; the mark comes last, so a crash is found out."""
    if shown == Snapshot():
        return
    waiting = {d.version for d in differences(now, shown, reading) if d.kind == "decision"}  # set this moment
    for number, version in shown.versions.items():
        wanted = {} if number in waiting else expected_tags(now.review(number), reading)
        for key, value in wanted.items():
            if version.tags.get(key) != value:
                _set_tag(store, name, number, key, value)
    for alias in (CHAMPION, PREVIOUS, CANDIDATE):
        target = now.aliases.get(alias)
        if shown.aliases.get(alias) != target and (target is None or target in shown.versions):
            _set_alias(store, name, alias, target)
    own: dict[str, str] = {"review_state": model_state(now, shown.versions)}
    if now.last is not None:
        own[MARK] = full_mark(reading, now.last)
    for key, value in own.items():
        if shown.tags.get(key) != value:
            _set_own_tag(store, name, key, value)


def _set_own_tag(store: "Store", name: str, key: str, value: str) -> None:
    store.call(lambda: store.client.set_registered_model_tag(name, key, value))


def _set_alias(store: "Store", name: str, alias: str, target: int | None) -> None:
    client = store.client
    if target is None:
        store.call(lambda: client.delete_registered_model_alias(name, alias))
    else:
        store.call(lambda: client.set_registered_model_alias(name, alias, str(target)))


def _set_tag(store: "Store", name: str, version: int, key: str, value: str | None) -> None:
    client, number = store.client, str(version)
    if value is None:
        store.call(lambda: client.delete_model_version_tag(name, number, key))
    else:
        store.call(lambda: client.set_model_version_tag(name, number, key, value))


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)
