"""What lies in a runtime's folder, and what of it may be believed.

FOLDER/lock          one process at a time
FOLDER/state.json    which release is active, and how far it is trusted (`slots.py`)
FOLDER/slots/        releases with what proves them
FOLDER/policy.json   the policy with what proves it
FOLDER/files/        models and golden inputs by their SHA-256
FOLDER/tuf/          metadata of the repository, as python-tuf keeps it
"""

import contextlib
from pathlib import Path

from fleet.device.durable import write_durably
from fleet.device.errors import UserError
from fleet.device.release import (
    BEFORE_TARGET,
    POLICY_TARGET,
    RELEASE_TARGET,
    FileOf,
    Policy,
    Release,
    Tier,
    TierPlan,
)
from fleet.device.runtime.folder import FolderLock, disk_errors
from fleet.device.runtime.refusal import UpdateRefusedError
from fleet.device.runtime.slots import Entry, Slots
from fleet.device.runtime.store import Store
from fleet.device.runtime.tiers import DeviceInfo, tier_of
from fleet.device.runtime.trust import Sealed, trusted_roots


class Home:
    """A runtime's folder, held until `release`.

    Raises:
        UserError: another runtime works in it, or it cannot be written.
        UpdateRefusedError: reason `signature`: `root` is no root of trust.
    """

    def __init__(self, folder: Path, device: DeviceInfo, *, root: bytes, monitor_version: str) -> None:
        """Open `folder` for an app that carries `root` and a monitor of this version."""
        self.device, self.root, self.monitor_version = device, root, monitor_version
        self.tuf_folder, self._policy_file = folder / "tuf", folder / "policy.json"
        trusted_roots(root, self.tuf_folder)
        self._lock = FolderLock(folder)
        try:
            self.store, self.slots = Store(folder / "files"), Slots(folder)
            self.policy = self._policy_here()
        except BaseException:  # nobody else could drop the lock
            self._lock.release()
            raise
        self.coming: tuple[FileOf, ...] = ()
        """Files that an update is bringing: not to be tidied away."""

    def release(self) -> None:
        """Let another runtime in; safe to call twice."""
        self._lock.release()

    @property
    def tier(self) -> Tier:
        """That policy and device say; what runs may be another, until its files are here."""
        return tier_of(self.device, self.policy)

    def release_in(self, sealed: Sealed) -> Release:
        """The release in a sealed record that proves itself.

        Raises:
            UpdateRefusedError: reasons `signature`, `content`.
        """
        target = BEFORE_TARGET if sealed.target == BEFORE_TARGET else RELEASE_TARGET
        content = sealed.verified(target, trusted_roots(self.root, self.tuf_folder))
        try:
            return Release.parse(content)
        except UserError as error:
            raise UpdateRefusedError("content", f"{error.got}, allowed {error.allowed}") from error

    def policy_in(self, sealed: Sealed) -> Policy:
        """The policy in a sealed record that proves itself.

        Raises:
            UpdateRefusedError: reasons `signature`, `content`.
        """
        content = sealed.verified(POLICY_TARGET, trusted_roots(self.root, self.tuf_folder))
        try:
            return Policy.parse(content)
        except UserError as error:
            raise UpdateRefusedError("content", f"{error.got}, allowed {error.allowed}") from error

    def keep_policy(self, sealed: Sealed, policy: Policy) -> None:
        """Obey this policy from now on, over restarts.

        Raises:
            UpdateRefusedError: reason `disk`; then the one before is obeyed.
        """
        with disk_errors(self._policy_file):
            write_durably(self._policy_file, sealed.to_bytes())
        self.policy = policy

    def plan_of(self, entry: Entry) -> tuple[Release, TierPlan]:
        """The release in a slot, and what its tier runs.

        Raises:
            UpdateRefusedError: reason `signature`: damaged, edited, or of another counter.
        """
        release = self.release_in(Sealed.read(self.slots.path(entry.counter)))
        plan = release.tiers.get(entry.tier)
        if release.counter != entry.counter or plan is None or plan.action != "run":
            raise UpdateRefusedError(
                "signature",
                f"slot {entry.counter} holds release {release.counter}, whose tier {entry.tier} runs nothing",
            )
        return release, plan

    def is_whole(self, entry: Entry) -> bool:
        """Whether a release lies here undamaged, its files included."""
        try:
            release, _ = self.plan_of(entry)
        except UpdateRefusedError:
            return False
        return all(self.store.has(file) for file in release.files_of(entry.tier))

    def tidy(self) -> None:
        """Remove the files of releases that are gone; but none while a slot cannot be read."""
        state = self.slots.state
        with contextlib.suppress(UpdateRefusedError):
            files = [
                file
                for entry in (state.active, state.previous)
                if entry
                for file in self.plan_of(entry)[0].files_of(entry.tier)
            ]
            self.store.keep_only([*files, *self.coming])

    def _policy_here(self) -> Policy | None:
        """The policy kept before; one that is damaged or edited is as good as none."""
        try:
            return self.policy_in(Sealed.read(self._policy_file))
        except UpdateRefusedError:
            return None
