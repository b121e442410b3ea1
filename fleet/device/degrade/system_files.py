"""Reading /proc and /sys, where a file may be missing, huge, no text, no number or no file."""

import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_BYTES = 64 * 1024
_MOST_ENTRIES = 256  # of a folder of sensors


def read_text(path: Path) -> str | None:
    """The first 64 KiB of a regular file, without white space around; None where there is none to read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a FIFO or a terminal would block, or never end
            return None
        return os.read(descriptor, _MOST_BYTES).decode("ascii", errors="replace").strip("\0 \t\r\n")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_number(path: Path) -> float | None:
    """A finite number, or None."""
    text = read_text(path)
    if text is None or len(text) > 40 or "_" in text:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def entries(folder: Path, pattern: str = "*") -> Iterator[Path]:
    """What lies in a folder, in order of names; nothing where there is no folder."""
    try:
        found = sorted(folder.glob(pattern))
    except OSError:
        return
    yield from found[:_MOST_ENTRIES]
