"""The inference thread gives way: a lower priority for it alone (M8).

Linux schedules threads, and setpriority(2) there takes a thread's id; elsewhere it would be the process's.
"""

import os
import sys
import threading
from dataclasses import dataclass

LOW_NICE = 10


@dataclass(frozen=True, kw_only=True)
class Priority:
    """What became of the wish."""

    nice: int | None
    """Of the thread now; None where the system does not say."""
    refused: str
    """What the system said against it; empty when it was granted."""


def lower_thread_priority(nice: int = LOW_NICE, *, thread_id: int | None = None) -> Priority:
    """Give a thread (the calling one without `thread_id`, a native id) this nice value; never raises.

    There is no way back for a process without privileges: nice values only grow. Threads that the
    thread starts later inherit it: the engine's workers too, if its session is made in here.
    """
    if not sys.platform.startswith("linux"):
        return Priority(nice=None, refused=f"{sys.platform} has no priorities of threads")
    thread = threading.get_native_id() if thread_id is None else thread_id
    try:
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        return Priority(nice=_nice(thread), refused=error.strerror or str(error))
    got = _nice(thread)
    return Priority(nice=got, refused="" if got == nice else f"the system made it {got}")


def _nice(thread: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:
        return None
