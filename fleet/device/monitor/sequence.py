"""Numbers of windows that are never given twice, whatever ends the process.

They are reserved on the disk in blocks before the first of a block is used; a killed process leaves a gap.
"""

import zlib
from pathlib import Path

from fleet.device.durable import write_durably

BLOCK = 64


class Sequences:
    """Gives the numbers of one device, from the file that remembers them."""

    def __init__(self, path: Path, *, above: int, now_ms: int) -> None:
        """Go on after what is reserved in `path`.

        Args:
            path: The file; it is made with the first number.
            above: A number known to be used.
            now_ms: Wall time. When the file is missing or broken, numbers go on from here: an app installed
                anew may have the key of before, and the gateway takes a number it knows for a repeat. One a
                millisecond would be more than any device ever used.

        Raises:
            OSError: the file is there and cannot be read.
        """
        self._path = path
        reserved = _reserved(path)
        self.was_broken = reserved is None and path.exists()
        self._next = max(above + 1, now_ms if reserved is None else reserved + 1)
        self._reserved = self._next - 1

    def next(self) -> int:
        """The next number.

        Raises:
            OSError: the disk does not take the reservation; no number was used.
        """
        if self._next > self._reserved:
            last = self._next + BLOCK - 1
            text = str(last).encode()
            write_durably(self._path, b"%s %08x\n" % (text, zlib.crc32(text)))
            self._reserved = last
        number = self._next
        self._next += 1
        return number


def _reserved(path: Path) -> int | None:
    """The last number of the last block; None when the file is missing or broken."""
    try:
        number, _, check = path.read_bytes().strip().partition(b" ")
    except FileNotFoundError:
        return None
    whole = number.isdigit() and len(number) < 20 and check == b"%08x" % zlib.crc32(number)
    return int(number) if whole else None
