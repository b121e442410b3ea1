"""Progress of long work on stderr: a bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_LOG_EVERY_S = 10.0


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield `items` and show how far through `total` the work is."""
    if not sys.stderr.isatty():
        yield from _logged(items, description, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        for item in items:
            yield item
            bar.advance(task)


def _logged(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last > _LOG_EVERY_S:
            last = time.monotonic()
            print(f"{description}: {done}/{total}", file=sys.stderr, flush=True)
