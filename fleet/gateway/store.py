"""One thread writes: it commits what has queued up in one transaction, and only then is anybody answered."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from fleet.gateway import database
from fleet.gateway.refusal import Refusal, unavailable

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], Any]
"""Runs inside the group's transaction. It refuses before it writes: others share the transaction."""


@dataclass(frozen=True, slots=True)
class _Queued:
    job: Job
    done: "asyncio.Future[Any]"


class Store:
    """The writer of a state folder; `run` from the event loop that made it."""

    def __init__(self, folder: Path, *, group: int, waiting: int) -> None:
        """Open the state and start the thread.

        Args:
            folder: State folder.
            group: Jobs in one transaction at most.
            waiting: Jobs that may wait.

        Raises:
            sqlite3.Error: the state cannot be opened.
        """
        self._connection = database.opened(folder)
        self.read = database.reader(folder)
        """For the event loop: short look-ups by key."""
        self._group, self._most_waiting = group, waiting
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Queued | None] = SimpleQueue()
        self.waiting = 0
        """Jobs that were not answered yet."""
        self.groups = 0
        """Committed so far."""
        self._thread = threading.Thread(target=self._write, name="edgeloop-gateway-writer", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """What the job returned, once its transaction is on the disk.

        Raises:
            Refusal: the job's own, or 503: too many wait, or the disk does not take it.
        """
        if self.waiting >= self._most_waiting:
            raise unavailable("busy", f"{self.waiting} requests are waiting")
        done: asyncio.Future[T] = self._loop.create_future()
        self.waiting += 1
        self._queue.put(_Queued(job, done))
        return await done

    async def close(self) -> None:
        """Commit what waits and end the thread."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._connection.close()
        self.read.close()

    def _write(self) -> None:
        ended = False
        while not ended:
            first = self._queue.get()
            taken = [first]
            while len(taken) < self._group and not self._queue.empty():
                taken.append(self._queue.get())
            ended = None in taken
            if group := [queued for queued in taken if queued is not None]:
                outcomes = self._committed(group)
                self._loop.call_soon_threadsafe(self._answer, group, outcomes)

    def _committed(self, group: list[_Queued]) -> list[Any]:
        """What each job returned, or the exception it ends with."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._outcome(queued.job) for queued in group]
            self._connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001  # a thread that died would leave everybody waiting
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back by itself
                self._connection.execute("ROLLBACK")
            known = unavailable("disk", f"the store: {error}") if isinstance(error, sqlite3.Error) else error
            return [known] * len(group)
        self.groups += 1
        return outcomes

    def _outcome(self, job: Job) -> Any:
        try:
            return job(self._connection)
        except Refusal as refusal:
            return refusal

    def _answer(self, group: list[_Queued], outcomes: list[Any]) -> None:
        self.waiting -= len(group)
        for queued, outcome in zip(group, outcomes, strict=True):
            if queued.done.done():  # its client has gone
                continue
            if isinstance(outcome, Exception):
                queued.done.set_exception(outcome)
            else:
                queued.done.set_result(outcome)
