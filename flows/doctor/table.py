"""Findings and numbers as text: whole in a pipe or a file, wrapped in a terminal, cut nowhere.

Written with Python alone: the doctor has to speak where the packages are broken.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from flows.doctor.finding import Finding
from tasks.terminal import plain

_NARROW = 90
"""Below this many columns a text beside its name would be a thin strip: it goes below."""
_MARGIN = 2
_COLOURS = {"ok": "32", "warning": "33", "problem": "1;31"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Each finding, with its next step below it."""
    width = terminal_width()
    indent = 9 + max((len(f.check) for f in findings), default=0) + _MARGIN
    for f in findings:
        status = _coloured(f"{f.status:7}", _COLOURS[f.status])
        if width is not None and width < _NARROW:
            print(f"{status} {f.check}")
            for text in _texts(f):
                print(*_wrapped(text, width, _MARGIN), sep="\n")
            continue
        first, *more = [line for text in _texts(f) for line in _wrapped(text, width, indent)]
        print(f"{status}  {f.check}".ljust(indent + len(status) - 7) + first.lstrip())
        print("".join(f"{line}\n" for line in more), end="")


def print_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of short cells."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def terminal_width() -> int | None:
    """Columns of the terminal on stdout; None in a pipe or a file, where lines may be long."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _texts(finding: Finding) -> Iterator[str]:
    yield plain(finding.found)
    if finding.next_step:
        yield f"next: {plain(finding.next_step)}"


def _wrapped(text: str, width: int | None, indent: int) -> list[str]:
    """Lines of at most `width` columns; words longer than a line, as paths are, go on in the next."""
    blank = " " * indent
    if width is None:
        return [blank + text]
    return textwrap.wrap(
        text,
        max(width, indent + 10),
        initial_indent=blank,
        subsequent_indent=blank,
        break_long_words=True,
        break_on_hyphens=False,
    )


def _coloured(text: str, code: str) -> str:
    colourless = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if colourless else f"\x1b[{code}m{text}\x1b[0m"
