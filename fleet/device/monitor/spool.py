"""Windows on the disk until the gateway has them: bounded, and each file there whole or not at all.

    FOLDER/lock                          held by the process that monitors here
    FOLDER/sequence                      numbers that may have been used
    FOLDER/windows/NUMBER-a.json         one window; a: with anomalies, n: without
    FOLDER/aside/NUMBER-a.json.WHY       broken on the disk, or refused by the gateway; the last few
    FOLDER/uploads.jsonl                 see upload_log.py

A window file is a checksum, a newline and the JSON. A window gets its number when it is written: what waits
in memory, because the disk is full or read-only, has none and is not sent.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from fleet.device.durable import remove_leftovers, write_durably
from fleet.device.errors import UserError
from fleet.device.monitor.encoding import encode_window
from fleet.device.monitor.loss import LossCounter, together
from fleet.device.monitor.sequence import Sequences
from fleet.device.monitor.window import UNNUMBERED
from fleet.device.wall import now_ms
from fleet.device.wire import Loss, Window

MOST_WINDOWS = 4096
"""On the disk; about 10 MB, and 8 hours at 15 inferences per second."""
MOST_IN_MEMORY = 64
"""While the disk takes none."""
_MOST_ASIDE = 32
_RETRY_S = 5.0
_NAME = re.compile(r"(\d{20})-([an])\.json")
_log = logging.getLogger(__name__)


class Spool:
    """The windows of one device. `put`, `settle`, `close` belong to one thread, the rest to any."""

    def __init__(
        self,
        folder: Path,
        loss: LossCounter,
        *,
        most_windows: int = MOST_WINDOWS,
        wall_ms: Callable[[], int] = now_ms,
    ) -> None:
        """Open the folder, made when there is none; one that cannot be used now is tried again later.

        Raises:
            UserError: another process monitors there.
        """
        self.folder, self._loss, self._most, self._wall_ms = folder, loss, most_windows, wall_ms
        self._windows, self._aside = folder / "windows", folder / "aside"
        self._lock = threading.Lock()
        self._waiting: dict[int, bool] = {}  # number -> whether it has anomalies; oldest first
        self._in_flight: frozenset[int] = frozenset()
        self._giving_way: int | None = None
        self._memory: list[Window] = []
        self._sequences: Sequences | None = None
        self._lock_file: int | None = None
        self._retry_at, self._in_trouble = 0.0, False
        try:
            self._open()
        except OSError as error:
            self._cannot("be opened", error)

    def close(self) -> int:
        """Try once more to write what is in memory, and let go of the folder.

        Returns:
            Windows that could not be written: they are lost.
        """
        self._retry_at = 0.0
        self.settle()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None
        if self._memory:
            _log.warning("%s: %d windows could not be written and are lost", self.folder, len(self._memory))
        return len(self._memory)

    def put(self, window: Window) -> None:
        """Keep a window: on the disk, or in memory, where the oldest gives way. Never raises."""
        self._memory.append(window)
        self.settle()
        while len(self._memory) > MOST_IN_MEMORY:
            calm = (place for place, kept in enumerate(self._memory) if not kept.anomalies)
            dropped = self._memory.pop(next(calm, 0))
            self._loss.add(together(dropped.loss, Loss(dropped_windows=1)))

    def settle(self) -> None:
        """Write what is in memory; after a failure not again for some seconds. Never raises."""
        if not self._memory or time.monotonic() < self._retry_at:
            return
        try:
            sequences = self._sequences or self._open()
            while self._memory:
                if self._memory[0].sequence == UNNUMBERED:  # a write that failed half-way keeps its number
                    self._memory[0] = replace(self._memory[0], sequence=sequences.next())
                self._write(self._memory[0])
                del self._memory[0]
            self._in_trouble = False
        except (OSError, UserError) as error:
            self._cannot("be written", error)

    @property
    def in_memory(self) -> int:
        """Windows that the disk did not take yet."""
        return len(self._memory)

    def waiting(self) -> dict[int, bool]:
        """Numbers of the windows on the disk, oldest first, and whether they have anomalies."""
        with self._lock:
            return dict(self._waiting)

    @contextlib.contextmanager
    def in_flight(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Spare windows while they are sent: what the gateway may just be taking is not dropped and counted.

        Yields:
            Those of them that are spared: not one that is being dropped and counted in this moment.
        """
        with self._lock:
            spared = [number for number in numbers if number != self._giving_way]
            self._in_flight = frozenset(spared)
        try:
            yield spared
        finally:
            with self._lock:
                self._in_flight = frozenset()

    def read(self, number: int) -> bytes | None:
        """The JSON of a window; None when it is gone, or broken: then it is put aside and counted."""
        path = self._path(number)
        try:
            content = _whole(path.read_bytes())
        except FileNotFoundError:
            self._lost(number)
            return None
        except OSError as error:
            _log.warning("%s cannot be read: %s", path, error)
            return None
        if content is None:
            self.put_aside(number, "broken")
        return content

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget windows. Never raises: what stays is sent again by the next process, same number."""
        for number in numbers:
            path = self._path(number)
            self._forget(number)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", path, error)

    def put_aside(self, number: int, why: str) -> None:
        """Keep a window out of the way and count it as lost. Never raises."""
        path = self._path(number)
        try:
            self._aside.mkdir(exist_ok=True)
            path.replace(self._aside / f"{path.name}.{why}")
            for old in sorted(self._aside.iterdir())[:-_MOST_ASIDE]:
                old.unlink()
        except OSError as error:
            _log.warning("%s is %s and cannot be put aside: %s", path, why, error)
        self._lost(number)

    def _open(self) -> Sequences:
        self._windows.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        for folder in (self.folder, self._windows):
            remove_leftovers(folder)
        found = (_NAME.fullmatch(entry.name) for entry in self._windows.iterdir())
        waiting = {int(match[1]): match[2] == "a" for match in found if match}
        with self._lock:
            self._waiting = dict(sorted(waiting.items()))
        self._sequences = Sequences(
            self.folder / "sequence", above=max(waiting, default=0), now_ms=self._wall_ms()
        )
        if self._sequences.was_broken:
            _log.warning("%s: the numbers used are not readable; going on from the time", self.folder)
        return self._sequences

    def _take_lock(self) -> None:
        if self._lock_file is not None:
            return
        descriptor = os.open(self.folder / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"{self.folder}: another monitor writes there",
                allowed="one monitor a folder at a time",
                next_step="stop the other process, or give this one a folder and a device key of its own",
            ) from None
        self._lock_file = descriptor

    def _write(self, window: Window) -> None:
        with self._replacing() as victim:
            self._write_for(window, victim)

    def _write_for(self, window: Window, victim: int | None) -> None:
        if victim is not None:
            # What is dropped is told by the window that takes its place, so the count is as durable as it is.
            loss = together(window.loss, Loss(dropped_windows=1), self._loss_of(victim))
            window = replace(window, loss=loss)
        content = encode_window(window)
        anomalous = bool(window.anomalies)
        path = self._windows / _name(window.sequence, anomalous=anomalous)
        write_durably(path, b"%08x\n%s" % (zlib.crc32(content), content))
        with self._lock:
            self._waiting[window.sequence] = anomalous
        if victim is not None:
            self.remove([victim])

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[int | None]:
        """Which window gives way when the spool is full: the oldest without anomalies, else the oldest.

        Nobody sends it meanwhile.
        """
        with self._lock:
            free = [number for number in self._waiting if number not in self._in_flight]
            calm = (number for number in free if not self._waiting[number])
            if len(self._waiting) >= self._most:
                self._giving_way = next(calm, free[0] if free else None)
            victim = self._giving_way
        try:
            yield victim
        finally:
            with self._lock:
                self._giving_way = None

    def _loss_of(self, number: int) -> Loss:
        """What a window on the disk, maybe of another version, tells of losses; nothing if broken."""
        try:
            content = _whole(self._path(number).read_bytes())
        except OSError:
            return Loss()
        if content is None:
            return Loss()
        told = json.loads(content)["loss"]
        return Loss(**{field.name: told.get(field.name, 0) for field in fields(Loss)})

    def _path(self, number: int) -> Path:
        return self._windows / _name(number, anomalous=self._waiting.get(number, False))

    def _forget(self, number: int) -> bool:
        with self._lock:
            return self._waiting.pop(number, None) is not None

    def _lost(self, number: int) -> None:
        """Count a window that is gone, unless it gave way in this moment: then that was counted."""
        if self._forget(number):
            self._loss.add(Loss(dropped_windows=1))

    def _cannot(self, what: str, error: Exception) -> None:
        if not self._in_trouble:  # once, and not every few seconds
            _log.warning(
                "%s cannot %s: %s; the last %d windows are kept in memory",
                self.folder,
                what,
                error,
                MOST_IN_MEMORY,
            )
        self._in_trouble = True
        self._retry_at = time.monotonic() + _RETRY_S


def _name(number: int, *, anomalous: bool) -> str:
    return f"{number:020d}-{'a' if anomalous else 'n'}.json"


def _whole(raw: bytes) -> bytes | None:
    """The window in a file; None when it is not as it was written."""
    check, _, content = raw.partition(b"\n")
    return content if check == b"%08x" % zlib.crc32(content) else None
