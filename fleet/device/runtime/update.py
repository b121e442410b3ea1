"""What an update does: policy first, then the release that this device may take, file by file.

nothing     what the repository has runs already
policy      only the policy is new
installed   another release, or another tier of it, runs
repaired    the same release runs again; what was damaged here was brought anew
kept        there is another release, and this device keeps what it has; `reason` says why
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fleet.device.release import BEFORE_TARGET, POLICY_TARGET, RELEASE_TARGET, Release, Tier
from fleet.device.runtime.home import Home
from fleet.device.runtime.loaded import check_release
from fleet.device.runtime.refusal import Reason, UpdateRefusedError
from fleet.device.runtime.slots import Entry
from fleet.device.runtime.trust import Sealed
from fleet.device.runtime.updater import Updater

Action = Literal["nothing", "policy", "installed", "repaired", "kept"]


@dataclass(frozen=True, kw_only=True)
class Update:
    """What became of an update."""

    action: Action
    release: int
    """Counter of what runs, or would with the first request; 0: none."""
    tier: Tier
    """That policy and device say."""
    policy_version: int
    """0: none."""
    bytes_received: int
    """Metadata included."""
    demo: bool
    """The repository's root says that it is for demonstration only."""
    reason: Reason | None = None
    said: str = ""
    """Why it was kept."""


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """A release that this device may take."""

    entry: Entry
    release: Release
    sealed: Sealed
    sha256: str
    """Of `release.json`."""


class _KeptError(Exception):
    def __init__(self, reason: Reason, said: str) -> None:
        super().__init__(reason, said)
        self.reason, self.said = reason, said


def update_from(home: Home, updater: Updater, change_over: Callable[[Callable[[], None]], None]) -> Update:
    """Bring the device up to date.

    Args:
        home: What it has.
        updater: Not refreshed yet.
        change_over: Runs the step that changes what is active, then loads and swaps.

    Raises:
        UpdateRefusedError: what was refused; what ran goes on.
    """
    updater.refresh()
    policy_is_new = _take_policy(home, updater)
    if policy_is_new:
        change_over(lambda: None)
    action: Action = "policy" if policy_is_new else "nothing"
    kept: _KeptError | None = None
    try:
        offer = _offer(home, updater)
        if offer is not None and not _runs_whole(home, offer.entry):
            same = home.slots.state.active == offer.entry
            _bring(home, updater, offer)
            change_over(lambda: home.slots.install(offer.entry, offer.sealed, offer.sha256))
            action = "repaired" if same else "installed"
    except _KeptError as error:
        action, kept = "kept", error
    active = home.slots.state.active
    return Update(
        action=action,
        release=active.counter if active else 0,
        tier=home.tier,
        policy_version=home.policy.version if home.policy else 0,
        bytes_received=updater.bytes_received,
        demo=updater.is_demo(),
        reason=kept.reason if kept else None,
        said=kept.said if kept else "",
    )


def _take_policy(home: Home, updater: Updater) -> bool:
    """Whether there was a newer policy; it is obeyed from now on."""
    sealed = updater.sealed(POLICY_TARGET)
    if sealed is None:
        return False
    policy, known = home.policy_in(sealed), home.policy
    if known is not None and policy.version <= known.version:
        if policy != known:
            raise UpdateRefusedError(
                "counter", f"policy {policy.version} is not newer than policy {known.version} here"
            )
        return False
    home.keep_policy(sealed, policy)
    return True


def _offer(home: Home, updater: Updater) -> _Offer | None:
    """The release for this device; None when the repository has none.

    Raises:
        _KeptError: there is one, and it is not for this device, or not now.
        UpdateRefusedError: it is not what a repository may offer.
    """
    sealed = updater.sealed(RELEASE_TARGET)
    if sealed is None:
        return None
    release = home.release_in(sealed)
    if home.policy and not home.policy.rollout.takes(release.counter, home.device.id):
        active = home.slots.state.active
        if active is not None and active.counter == release.counter:
            return _checked(
                home, release, sealed
            )  # it has it already: a rollout that shrinks takes none back
        before = updater.sealed(BEFORE_TARGET) if active is None else None
        if before is None:
            raise _KeptError("rollout", f"release {release.counter} is not rolled out to this device")
        sealed, release = before, home.release_in(before)
    return _checked(home, release, sealed)


def _checked(home: Home, release: Release, sealed: Sealed) -> _Offer:
    state, tier = home.slots.state, home.tier
    sha256 = hashlib.sha256(sealed.content.encode()).hexdigest()
    if release.counter < state.highest or (
        release.counter == state.highest and state.highest_sha256 not in ("", sha256)
    ):
        raise UpdateRefusedError(
            "counter", f"release {release.counter} is not newer than release {state.highest}, which was here"
        )
    plan = release.tiers.get(tier)
    if plan is None or plan.action == "keep":
        raise _KeptError("tier", f"release {release.counter} lets tier {tier} keep what it has")
    try:
        check_release(release, plan, engine=home.device.engine_version, monitor=home.monitor_version)
    except UpdateRefusedError as error:
        if error.reason not in ("engine", "monitor"):
            raise
        raise _KeptError(error.reason, error.said) from error
    entry = Entry(counter=release.counter, tier=tier)
    if entry.name in state.bad:
        raise _KeptError("bad", f"release {entry.name} failed here: {state.bad[entry.name]}")
    return _Offer(entry=entry, release=release, sealed=sealed, sha256=sha256)


def _runs_whole(home: Home, entry: Entry) -> bool:
    return home.slots.state.active == entry and home.is_whole(entry)


def _bring(home: Home, updater: Updater, offer: _Offer) -> None:
    """Download what is not here yet."""
    home.coming = offer.release.files_of(offer.entry.tier)
    for file in home.coming:
        updater.fetch(file, home.store)
