"""The ledger: every decision on a release and every move of an alias, in the order in which they were made.

`.edgeloop/ledger.jsonl` is only appended to. A line is a JSON object that carries its number, the hash of the
line before and its own, so a line that was edited, inserted or taken out is found by reading. What a crash
left unfinished at the end is cut off by the next writer, who says so in the ledger. Numbers decide the order,
not times: clocks go backwards.
"""

import contextlib
import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from filelock import FileLock, Timeout

from fleet.device.durable import sync
from fleet.device.errors import UserError
from tasks.workspace import NO_ROOM

Action = Literal[
    "registered",
    "asked",
    "approved",
    "rejected",
    "refused",
    "alias",
    "tag_changed",
    "deleted",
    "recovered",
]

FILE = "ledger.jsonl"
_LOCK = "ledger.lock"
_START = "0" * 64
_SHOWN_HASH = 12


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What is to be written: an entry without its place in the ledger."""

    action: Action
    """`asked`: a decision made while MLflow did not answer; `refused`: an approval that was not carried out;
    `tag_changed`: an edit in MLflow that was put back; `deleted`: a version is no longer in MLflow;
    `recovered`: an unfinished last line was cut off."""
    name: str = ""
    """The registered model; empty in `recovered`."""
    version: int | None = None
    """None where an alias was taken away, and in `recovered`."""
    by: str = ""
    by_source: str = ""
    """How `by` was found out."""
    why: str = ""
    evidence_sha256: str = ""
    release_sha256: str = ""
    run_id: str = ""
    """The version's run in MLflow. A deleted model's version numbers are given again, run ids are not."""
    alias: str = ""
    """Of `alias`: which one moved, to `version`."""
    decision: str = ""
    """Of `asked`: `approved` or `rejected`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by name. Of `registered`: artifacts that the evidence does not speak of; of `approved`: the
    record in champion/."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Of `registered`: the tags that lead to build, commit, data and engine."""


@dataclass(frozen=True, kw_only=True)
class Entry(Draft):
    """A line of the ledger."""

    sequence: int
    """From 1."""
    time: str
    """UTC, as the clock of the writer had it."""
    previous_sha256: str
    sha256: str

    @property
    def mark(self) -> str:
        """Number and hash, short enough for a tag."""
        return f"{self.sequence}:{self.sha256[:_SHOWN_HASH]}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The ledger as it was read."""

    entries: tuple[Entry, ...]
    size: int
    """Bytes of whole lines; what lies behind them a crash left unfinished."""
    unfinished: bytes

    @property
    def ledger_id(self) -> str:
        """Which ledger this is; empty while it has no entry."""
        return self.entries[0].sha256[:_SHOWN_HASH] if self.entries else ""


class Ledger:
    """The ledger of one repository. Reading needs no lock; writing takes it."""

    def __init__(self, folder: Path) -> None:
        """Use the ledger in `folder`, the repository's `.edgeloop`; it is made by the first entry."""
        self.path = folder / FILE
        with self._writable():
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / _LOCK)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes during the block; may be nested. The second reviewer is told that he waits."""
        with self._writable():
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                print("another review is under way; waiting for it to end", file=sys.stderr)
                self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        """Make one clear error of a folder, lock or ledger that nobody may write; no room is not that."""
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            raise UserError(
                f"{error.filename or self.path} cannot be written: {error.strerror}",
                allowed=f"a folder {self.path.parent} that you may write, with {FILE} and {_LOCK} as files",
                next_step="see its permissions and what lies there",
            ) from error

    def read(self) -> Reading:
        """All entries.

        Raises:
            UserError: a line is not as it was written; names the first such line. Or it is no file.
        """
        if self.path.exists() and not self.path.is_file():
            raise UserError(
                f"{self.path} is no file",
                allowed="the ledger as it was written",
                next_step="move it away and bring the file back from a copy",
            )
        raw = self.path.read_bytes() if self.path.is_file() else b""
        whole, _, unfinished = raw.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        entries: list[Entry] = []
        for number, line in enumerate(lines, start=1):
            before = entries[-1].sha256 if entries else _START
            entries.append(self._parse(line, number, before))
        return Reading(entries=tuple(entries), size=len(whole) + 1 if whole else 0, unfinished=unfinished)

    def append(self, drafts: Sequence[Draft]) -> tuple[Entry, ...]:
        """Write entries, all of them or none, and return them when they are on the disk.

        Raises:
            UserError: the ledger was tampered with.
            OSError: there is no room; the ledger is as it was.
        """
        with self.locked():
            reading = self.read()
            cut = (_recovered(reading.unfinished),) if reading.unfinished else ()
            entries = _chained((*cut, *drafts), reading.entries)
            text = b"".join(_line(entry) for entry in entries)
            with self._writable():
                opened = self.path.open("ab+")
            with opened as file:
                file.truncate(reading.size)
                try:
                    _write_through(file, text)
                except OSError:
                    with contextlib.suppress(OSError):  # what stays is cut off by the next writer
                        file.truncate(reading.size)
                    raise
            if not reading.entries:
                sync(self.path.parent)
            return tuple(entries[len(cut) :])

    def _parse(self, line: bytes, number: int, before: str) -> Entry:
        try:
            record = json.loads(line)
            entry = Entry(**record)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._tampered(number, f"cannot be read ({' '.join(str(error).split())[:80]})") from error
        if _hash(record) != entry.sha256 or _text(record) != line:  # a key twice, another line end
            raise self._tampered(number, "was changed after it was written")
        if (entry.sequence, entry.previous_sha256) != (number, before):
            raise self._tampered(
                number, f"says it is entry {entry.sequence}, after another line than this one"
            )
        return entry

    def _tampered(self, number: int, what: str) -> UserError:
        return UserError(
            f"{self.path}, line {number} {what}",
            allowed="the lines as they were written",
            next_step="bring the file back from a copy. Without one, move it away and `edgeloop build`: "
            "a new ledger registers the build, which is then approved again",
        )

    def require_marked(self, mark: str, reading: Reading) -> None:
        """Refuse a ledger that has lost lines MLflow was told of.

        Args:
            mark: `LEDGER:SEQUENCE:HASH` as `full_mark` made it; of another ledger, or empty, it says nothing.
            reading: This ledger as read.

        Raises:
            UserError: the marked line is missing, or another one; or this ledger lost all its lines.
        """
        ledger, _, place = mark.partition(":")
        if place and self.path.is_file() and not reading.entries:
            raise self._tampered(1, f"is missing or cut short: MLflow was told of ledger {ledger}")
        if not place or ledger != reading.ledger_id:
            return
        if place not in {entry.mark for entry in reading.entries}:
            number = int(place.partition(":")[0]) if place.partition(":")[0].isdigit() else 0
            raise self._tampered(number, "is missing or another one: MLflow was told of it")


def full_mark(reading: Reading, entry: Entry) -> str:
    """An entry named so that another ledger's entries are told apart."""
    return f"{reading.ledger_id}:{entry.mark}"


def marked_sequence(mark: str, reading: Reading) -> int:
    """The number of the entry that `mark` names; 0 for one of another ledger, or none."""
    ledger, _, place = mark.partition(":")
    number = place.partition(":")[0]
    return int(number) if ledger == reading.ledger_id and number.isdigit() else 0


def _chained(drafts: Sequence[Draft], before: Sequence[Entry]) -> list[Entry]:
    entries, last = [], before[-1] if before else None
    for draft in drafts:
        record = asdict(draft) | {
            "sequence": last.sequence + 1 if last else 1,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "previous_sha256": last.sha256 if last else _START,
        }
        last = Entry(**record, sha256=_hash(record))
        entries.append(last)
    return entries


def _hash(record: Mapping[str, Any]) -> str:
    hashed = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def _line(entry: Entry) -> bytes:
    return _text(asdict(entry)) + b"\n"


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _recovered(unfinished: bytes) -> Draft:
    return Draft(
        action="recovered",
        by="edgeloop",
        why=f"the last line was not finished, {len(unfinished)} bytes were cut off: {unfinished[:200]!r}",
    )


def _write_through(file: BinaryIO, text: bytes) -> None:
    """Write to the disk itself; a write that ends early is an error as no room is."""
    written = os.write(file.fileno(), text)
    if written < len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    os.fsync(file.fileno())
