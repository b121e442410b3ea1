"""Progress of long work on stderr: a bar on a terminal, a line now and then in a log.

Where a build runs the stage, it writes that line: the stage leaves word in the file PROGRESS_FILE names.
"""

import contextvars
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PROGRESS_FILE = "EDGELOOP_PROGRESS_FILE"
"""Environment variable: where the build reads how far a stage is."""
_LOG_EVERY_S = 10.0
_TELL_EVERY_S = 1.0


@contextmanager
def ticking(every_s: float, tick: Callable[[float], None]) -> Iterator[None]:
    """Call `tick` with the seconds passed, again and again while the block runs, from a thread of its own."""
    started, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(every_s):
            tick(time.monotonic() - started)

    # With the caller's context: Prefect keeps there which server and which flow run it works with.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(beat,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield `items` and show how far through `total` the work is."""
    told = _told(items, description, total)
    if not sys.stderr.isatty():
        yield from _logged(told, description, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        for item in told:
            yield item
            bar.advance(task)


def _told(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Leave word for the build, when one runs this; none is left when the loop is over."""
    given = os.environ.get(PROGRESS_FILE)
    if given is None:
        yield from items
        return
    file, last = Path(given), -_TELL_EVERY_S
    try:
        for done, item in enumerate(items):
            if time.monotonic() - last >= _TELL_EVERY_S:
                last = time.monotonic()
                _leave_word(file, {"what": description, "done": done, "total": total})
            yield item
    finally:
        file.unlink(missing_ok=True)


def _leave_word(file: Path, word: dict[str, object]) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(word), encoding="utf-8")
        part.replace(file)
    except OSError:  # a full disk, or a build that has gone: no reason to stop the work
        return


def _logged(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last > _LOG_EVERY_S and PROGRESS_FILE not in os.environ:
            last = time.monotonic()
            print(f"{description}: {done}/{total}", file=sys.stderr, flush=True)
