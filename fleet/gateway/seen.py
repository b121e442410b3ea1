"""Which windows of a device are stored already: a bit for each of the newest sequence numbers.

Numbers may have gaps (a device that samples its windows skips some) and come in any order, so neither a
highest number nor a list of ranges would do. A window further behind the newest than the bits reach cannot
be told from a repeat: it is kept apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass

REACH = 32_768
"""Sequence numbers behind the newest one: 4 KiB a device."""
_MASK = (1 << REACH) - 1


@dataclass
class Seen:
    """Bit k says whether `newest - k` is stored."""

    newest: int = -1
    bits: int = 0

    @classmethod
    def of(cls, newest: int, bits: bytes) -> "Seen":
        """From how it is stored."""
        return cls(newest, int.from_bytes(bits, "little"))

    def to_bytes(self) -> bytes:
        """The bits, without the zeros at the end."""
        return self.bits.to_bytes((self.bits.bit_length() + 7) // 8, "little")

    def add(self, sequences: Iterable[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
        """Take windows in.

        Args:
            sequences: Index in the batch and sequence number of each.

        Returns:
            The indexes of new windows, of repeated ones, and of those that are too far behind to tell.
        """
        new: list[int] = []
        repeated: list[int] = []
        late: list[int] = []
        for index, sequence in sequences:
            behind = self.newest - sequence
            if behind < 0:
                ahead = -behind
                # Not shifted by what a hostile number says: that would take all memory.
                self.bits = (self.bits << ahead) & _MASK | 1 if ahead < REACH else 1
                self.newest = sequence
                new.append(index)
            elif behind >= REACH:
                late.append(index)
            elif self.bits >> behind & 1:
                repeated.append(index)
            else:
                self.bits |= 1 << behind
                new.append(index)
        return new, repeated, late
