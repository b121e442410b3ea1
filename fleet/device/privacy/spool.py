"""Samples that wait to be sent: a file each, exactly the request's body, bounded by day and by disk."""

import hashlib
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet.device.durable import remove_leftovers, write_durably
from fleet.device.privacy.consent import SAMPLES, Consent, purge
from fleet.device.wire import MOST_SAMPLE_BYTES

_BUDGET = "budget.json"
_DAY_MS = 86_400_000
_FIRST_DAY = 19_723  # 2024-01-01: a clock before it was never set
_SUFFIX = ".json"


@dataclass(frozen=True, kw_only=True)
class SampleLimits:
    """How much is collected."""

    per_day: int = 20
    most_bytes: int = 16 << 20
    """Of all that waits."""


class SampleSpool:
    """The samples of one device. One thread writes; consent may end at any time, by any process."""

    def __init__(self, consent: Consent, limits: SampleLimits) -> None:
        """Finish a revocation that a killed process began, and remove what it left half-written."""
        self._consent, self._limits = consent, limits
        self._folder = consent.folder / SAMPLES
        if not consent.holds():
            purge(consent.folder)
        remove_leftovers(self._folder)

    def put(self, image_png: bytes, body: bytes, now_ms: int) -> str:
        """Keep one sample; why it was not kept, or empty.

        Raises:
            OSError: the disk did not take it; nothing of it is left.
        """
        if not self._consent.holds():
            return "no consent"
        if len(body) > MOST_SAMPLE_BYTES:
            return "too large"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.is_symlink():
            return "samples is a link"
        path = self._folder / f"{hashlib.sha256(image_png).hexdigest()}{_SUFFIX}"
        if path.exists():
            return "known"
        if sum(size for _, size in self._sizes()) + len(body) > self._limits.most_bytes:
            return "disk bound"
        if not self._take_from_budget(now_ms // _DAY_MS):
            return "daily budget"
        write_durably(path, body)
        if not self._consent.holds():  # revoked meanwhile: by now its purge may be over
            path.unlink(missing_ok=True)
            return "no consent"
        return ""

    def waiting(self) -> list[Path]:
        """The files, the oldest first; one that grew beyond what is ever sent is removed."""
        aged = []
        for path, size in self._sizes():
            if size > MOST_SAMPLE_BYTES:
                path.unlink(missing_ok=True)
                continue
            try:
                aged.append((path.stat().st_mtime_ns, path.name, path))
            except FileNotFoundError:
                continue  # revoked meanwhile
        return [path for *_, path in sorted(aged)]

    def _sizes(self) -> Iterator[tuple[Path, int]]:
        if self._folder.is_symlink():
            return
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):  # what else lies there is no sample of ours
                yield path, status.st_size

    def _take_from_budget(self, day: int) -> bool:
        """Count one sample; a clock that was put back opens no new budget."""
        path = self._consent.folder / _BUDGET
        try:
            record = json.loads(path.read_bytes())
            before, used = int(record["day"]), int(record["used"])
        except FileNotFoundError:
            before, used = day, 0
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            before, used = day, self._limits.per_day  # unknown: for today it is used up
        if day < _FIRST_DAY:
            return False
        used = 0 if day > before else used
        granted = used < self._limits.per_day
        write_durably(path, json.dumps({"day": max(day, before), "used": used + granted}).encode())
        return granted
