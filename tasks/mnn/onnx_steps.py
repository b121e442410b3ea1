"""What a conversion is doing, on stderr: minutes may pass in a child process that says nothing."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

STILL_EVERY_S = 20.0
"""How often a log is told that a step goes on."""


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Show what the block does: on a terminal with a clock and until it ends, in a log as lines."""
    if not sys.stderr.isatty():
        with _logged(what):
            yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(what, total=None)
        yield


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    started, ended = time.monotonic(), threading.Event()

    def remind() -> None:
        while not ended.wait(STILL_EVERY_S):
            print(f"convert: {what}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    print(f"convert: {what}", file=sys.stderr, flush=True)
    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    finally:
        ended.set()
        reminder.join()
