"""One registered model under review: its ledger, its image in MLflow, and the acts that change both.

Every act writes the ledger first and MLflow after; what comes between (a crash, a full disk, a server that
went away) `settle` finishes at the next command.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.mlflow_file import Snapshot, registered_name
from tasks.mlflow_store import Store
from tasks.review.author import Author
from tasks.review.champion_folder import crown, is_crowned, record_of, uncrown
from tasks.review.ledger import Action, Draft, Entry, Ledger, Reading
from tasks.review.registry import require_known, show, snapshot
from tasks.review.release import (
    MisledError,
    Release,
    ReleaseRefusedError,
    fetch,
    require_own_source,
    require_version,
)
from tasks.review.standing import CHAMPION, MARK, PREVIOUS, Standing, demotion, heirs, promotion, standing
from tasks.tracking import state_folder, tracking_uri
from tasks.workspace import Workspace

EDGELOOP = Author(name="edgeloop", source="found by itself")


class Desk:
    """The review of one workspace's model. Everything happens under the ledger's lock: see `open_desk`."""

    def __init__(self, workspace: Workspace, ledger: Ledger, store: Store) -> None:
        """Use `open_desk`."""
        self.workspace, self.ledger, self.store = workspace, ledger, store
        self.name = registered_name(workspace.name)
        self.written: list[Entry] = []
        """What this desk added to the ledger."""
        self.trouble: ReleaseRefusedError | None = None
        """Why champion/ is not the ledger's champion; a build must not be judged against it."""
        self._seen: Snapshot | None = None

    def look(self) -> tuple[Reading, Standing, Snapshot]:
        """The ledger, what it says of this model, and what MLflow shows of it.

        Raises:
            UserError: the ledger was tampered with, or MLflow has never seen it.
        """
        reading = self.ledger.read()
        now = standing(reading.entries, self.name)
        if self._seen is None:
            seen = snapshot(self.store, self.name)
            self.ledger.require_marked(seen.tags.get(MARK, ""), reading)
            require_known(self.store.uri, self.name, now, seen, reading)
            self._seen = seen
        return reading, now, self._seen

    def look_again(self) -> None:
        """See what MLflow shows now, which others change at any time."""
        self._seen = None

    def write(self, drafts: Sequence[Draft]) -> None:
        """Add to the ledger."""
        if drafts:
            self.written += self.ledger.append(drafts)

    def draft(self, action: Action, version: int, who: Author, why: str) -> Draft:
        """An entry about a version, with the hashes and the run it has in MLflow."""
        _, now, shown = self.look()
        version_shown, review = shown.versions.get(version), now.review(version)
        known = review.registered or review.decided
        tags = version_shown.tags if version_shown else {}
        return Draft(
            action=action,
            name=self.name,
            version=version,
            by=who.name,
            by_source=who.source,
            why=why,
            run_id=version_shown.run_id if version_shown else "",
            evidence_sha256=known.evidence_sha256 if known else tags.get("evidence_sha256", ""),
            release_sha256=known.release_sha256 if known else tags.get("release_sha256", ""),
        )

    @contextmanager
    def fetched(self, version: int) -> Iterator[Release]:
        """A version's artifacts, verified, for the block.

        Raises:
            ReleaseRefusedError: there is no such version, its files are not what was registered, or the gate
                did not pass.
        """
        _, now, shown = self.look()
        require_version(self.name, version, shown)
        with tempfile.TemporaryDirectory() as folder:
            review, version_shown = now.review(version), shown.versions[version]
            yield fetch(
                self.store, self.name, version, version=version_shown, review=review, into=Path(folder)
            )

    def promote(self, version: int, reason: Draft) -> None:
        """Make an approved version the champion; the one before becomes `previous`."""
        _, now, _ = self.look()
        self.write(promotion(now, version, reason))

    def dethrone(self, version: int, reason: Draft) -> list[Draft]:
        """The moves that take every alias from a version; its heir, if it needs one, is verified first."""
        _, now, _ = self.look()
        heir = None
        if now.aliases.get(CHAMPION) == version:
            heir = self._heir(now, version)
        return demotion(now, version, heir, reason)

    def _heir(self, now: Standing, version: int) -> int | None:
        for number in heirs(now, version):
            try:
                with self.fetched(number):
                    return number
            except ReleaseRefusedError as error:
                self.write(
                    [self.draft("refused", number, EDGELOOP, f"cannot be champion again: {error.got}")]
                )
        return None

    def settle(self) -> None:
        """Finish what was begun: promote what was approved, dethrone what was not, and show it all.

        What keeps champion/ from being brought up to the ledger stays in `trouble`: others are decided on.
        """
        _, now, shown = self.look()
        for version in now.unpromoted:
            reason = now.review(version).decided
            if reason is not None and version in shown.versions:
                self.promote(version, reason)
        _, now, _ = self.look()
        champion = now.aliases.get(CHAMPION)
        fallen = now.review(champion).decided if champion is not None else None
        if champion is not None and fallen is not None and fallen.action == "rejected":
            self.write(self.dethrone(champion, fallen))
        self._reject_misled()
        try:
            self.crown()
            self.trouble = None
        except ReleaseRefusedError as error:
            self.trouble = error
        self.look_again()
        reading, now, shown = self.look()
        show(self.store, self.name, now, shown, reading)
        self.look_again()

    def _reject_misled(self) -> None:
        """Reject the champion, and the one before, where MLflow leads to files that nobody verified."""
        _, now, shown = self.look()
        for version in [now.aliases[alias] for alias in (CHAMPION, PREVIOUS) if alias in now.aliases]:
            if version not in shown.versions:
                continue
            try:
                require_own_source(self.store, self.name, version, shown.versions[version])
            except MisledError as error:
                reason = self.draft("rejected", version, EDGELOOP, error.got)
                self.write([reason, *self.dethrone(version, reason)])
            except ReleaseRefusedError:  # a run that is gone leads nowhere else
                continue

    def require_crowned(self) -> None:
        """Refuse to judge a build against a champion/ that is not the ledger's.

        Raises:
            ReleaseRefusedError: the champion's artifacts are not what was approved.
        """
        if self.trouble is not None:
            raise self.trouble

    def crown(self) -> None:
        """Bring the workspace's champion/ up to the ledger.

        Raises:
            ReleaseRefusedError: the champion's artifacts are gone.
        """
        _, now, shown = self.look()
        if is_crowned(self.workspace.path, self.name, now):
            return
        champion = now.aliases.get(CHAMPION)
        if champion is None:
            uncrown(self.workspace.path)
        elif champion in shown.versions:
            try:
                with self.fetched(champion) as release:
                    crown(self.workspace.path, record_of(release), release)
            except ReleaseRefusedError as error:
                raise ReleaseRefusedError(
                    f"champion/ is not the champion's, and cannot be written again: {error.got}",
                    allowed="a champion whose artifacts in MLflow are those that were approved",
                    next_step=f"bring the artifact back, or `edgeloop release reject {self.name} {champion} "
                    '--why "..."`, which makes the champion before it champion',
                ) from error


@contextmanager
def open_desk(workspace: Workspace, store: Store | None = None) -> Iterator[Desk]:
    """The desk of a workspace, held alone for the block.

    Args:
        workspace: Whose model.
        store: MLflow, where it is open already.
    """
    state = state_folder(workspace.path)
    ledger = Ledger(state)
    with ledger.locked():
        yield Desk(workspace, ledger, store or Store(tracking_uri(workspace.path), state))
