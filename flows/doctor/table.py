"""Findings and numbers as text: whole in a pipe or a file, wrapped in a terminal, cut nowhere."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.doctor.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

_NARROW = 90
"""Below this many columns a text beside its name would be a thin strip: it goes below."""
_PIPE = 1_000_000
_STYLE = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def print_findings(findings: Sequence[Finding]) -> None:
    """What is a problem, a warning and in order, each with its next step below it."""
    from rich.table import Table
    from rich.text import Text

    console = _console()
    if console.width < _NARROW:
        for f in findings:
            console.print(Text.assemble((f.status, _STYLE[f.status]), " ", (f.check, "bold")))
            for line in _lines(f):
                console.print(_indented(line))
        return
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for f in findings:
        first, *more = _lines(f)
        grid.add_row(Text(f.status, _STYLE[f.status]), f.check, Text(first))
        for line in more:
            grid.add_row("", "", Text(line))
    _print_grid(console, grid)


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of short cells."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _print_grid(_console(), table)


def _lines(finding: Finding) -> list[str]:
    return [finding.found, *([f"next: {finding.next_step}"] if finding.next_step else [])]


def _console() -> "Console":
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE, highlight=False)


def _indented(line: str) -> object:
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(line, overflow="fold"), (0, 0, 0, 2))


def _print_grid(console: "Console", table: object) -> None:
    """Print without the blanks that pad the last column; in a pipe they would be all there is to see."""
    if sys.stdout.isatty():
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
