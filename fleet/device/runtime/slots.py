"""Two releases on a device: the active one and the one before it, which is what to fall back on.

    slots/COUNTER.json      a sealed release, written once
    state.json              which of them is active, and how far it is to be trusted

A slot is never changed, and `state.json` is replaced as a whole: whenever the process ends, the next one
finds a state from before or after a step, and both name a release that is completely there.

    trying  ->  good        it answered its first inferences
            ->  bad         load, self-test or one of them failed, or the process ended again and again
"""

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fleet.device.durable import remove_leftovers, sync, write_durably
from fleet.device.errors import UserError
from fleet.device.release import Release, Tier
from fleet.device.runtime.folder import disk_errors
from fleet.device.runtime.refusal import UpdateRefusedError
from fleet.device.runtime.trust import Sealed
from fleet.device.strict_json import json_bytes, read_json

MOST_STARTS = 3
"""Of a process that tries a release and ends without a word; then the release is bad."""
_MOST_BAD = 100
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A release as one tier runs it."""

    counter: int
    tier: Tier

    @property
    def name(self) -> str:
        """In `State.bad`."""
        return f"{self.counter}/{self.tier}"


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """`state.json`."""

    schema: int = _SCHEMA
    active: Entry | None = None
    status: Literal["trying", "good"] = "good"
    starts: int = 0
    """Loads of the active release while it is tried, since a process last ended in order."""
    served: int = 0
    """Inferences it answered while it is tried, as far as written."""
    previous: Entry | None = None
    highest: int = 0
    """Counter of the newest release that was ever installed."""
    highest_sha256: str = ""
    bad: dict[str, str] = field(default_factory=dict)
    """COUNTER/TIER to what was wrong; never tried again."""


class Slots:
    """The releases below a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the state; one that cannot be read is made anew from the slots."""
        self._folder, self._file = folder / "slots", folder / "state.json"
        with disk_errors(folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for place in (folder, self._folder):
                remove_leftovers(place)
        self.state, self._begun = self._read(), False

    def path(self, counter: int) -> Path:
        """Where a sealed release lies."""
        return self._folder / f"{counter}.json"

    def install(self, entry: Entry, sealed: Sealed, sha256: str) -> None:
        """Make a release active, to be tried; the one it replaces, if good, is what to fall back on.

        Raises:
            UpdateRefusedError: reason `bad`, or `disk`: then nothing has changed.
        """
        if entry.name in self.state.bad:
            raise UpdateRefusedError("bad", f"release {entry.name} failed here: {self.state.bad[entry.name]}")
        with disk_errors(self._folder):
            write_durably(self.path(entry.counter), sealed.to_bytes())
        state = self.state
        self._begun = False
        good = state.active if state.status == "good" and state.active != entry else state.previous
        self._write(
            replace(
                state,
                active=entry,
                status="trying",
                starts=0,
                served=0,
                previous=good,
                highest=max(state.highest, entry.counter),
                highest_sha256=sha256 if entry.counter >= state.highest else state.highest_sha256,
            )
        )

    def begin(self, entry: Entry) -> None:
        """Note, if this release is on trial, that it is about to be loaded: a process that dies of it cannot.

        Raises:
            UpdateRefusedError: reason `crash`: it ended so many processes already; or `disk`.
        """
        state = self.state
        if state.status != "trying" or state.active != entry or self._begun:
            return
        if state.starts >= MOST_STARTS:
            raise UpdateRefusedError("crash", f"{state.starts} processes ended while they tried it")
        self._write(replace(state, starts=state.starts + 1))
        self._begun = True

    def rest(self, served: int) -> None:
        """Note that the release on trial was unloaded, or not loaded, and this process is still alive."""
        if self.state.status == "trying":
            with contextlib.suppress(UpdateRefusedError):  # the disk: this start then counts as one that died
                self._write(replace(self.state, starts=0, served=served))
                self._begun = False

    def confirm(self) -> None:
        """The active release has proven itself."""
        self._write(replace(self.state, status="good", starts=0, served=0))
        self._remove_others()

    def fail(self, why: str) -> None:
        """The active release is bad: never again for this counter; the one before it is active."""
        state = self.state
        if state.active is None:
            return
        bad = dict([*state.bad.items(), (state.active.name, why[:500])][-_MOST_BAD:])
        after = replace(
            state, active=state.previous, status="good", starts=0, served=0, previous=None, bad=bad
        )
        try:
            self._write(after)
        except UpdateRefusedError:  # the disk: this process falls back all the same, the next one tries again
            self.state = after

    def _remove_others(self) -> None:
        kept = {self.path(entry.counter).name for entry in (self.state.active, self.state.previous) if entry}
        with disk_errors(self._folder):
            for path in self._folder.iterdir():
                if path.name not in kept:
                    path.unlink()
            sync(self._folder)

    def _write(self, state: State) -> None:
        with disk_errors(self._file):
            write_durably(self._file, json_bytes(state))
        self.state = state

    def _read(self) -> State:
        try:
            return read_json(State, self._file.read_bytes(), what=self._file.name, schema=_SCHEMA)
        except (OSError, UserError):
            return self._found()

    def _found(self) -> State:
        """A state from the slots that are there: the newest on trial, the one before it to fall back on.

        The tier is the middle one until a policy or the device says another; what was bad is tried again.
        """
        counters = sorted(
            (int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdecimal()), reverse=True
        )
        entries = [entry for counter in counters if (entry := self._entry(counter))]
        if not entries:
            return State()
        return State(
            active=entries[0],
            status="trying",
            previous=entries[1] if len(entries) > 1 else None,
            highest=entries[0].counter,
        )

    def _entry(self, counter: int) -> Entry | None:
        try:
            release = Release.parse(Sealed.read(self.path(counter)).content.encode())
        except (UserError, UpdateRefusedError):
            return None
        tiers: tuple[Tier, ...] = ("mid", "low", "high")
        runs = [tier for tier in tiers if tier in release.tiers and release.tiers[tier].action == "run"]
        return Entry(counter=counter, tier=runs[0]) if runs and release.counter == counter else None
