"""What a conversion is doing, on stderr: minutes may pass in a child process that says nothing."""

import contextlib
import sys
from collections.abc import Iterator

from tasks.progress import ticking

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
    def say(seconds: float) -> None:
        print(f"convert: {what}: {seconds:.0f} s", file=sys.stderr, flush=True)

    print(f"convert: {what}", file=sys.stderr, flush=True)
    with ticking(STILL_EVERY_S, say):
        yield
