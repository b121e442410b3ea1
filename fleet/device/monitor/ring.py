"""A ring buffer from one inference thread to one worker: the writer never waits, the loss is counted.

There is no lock. The writer fills a slot, its sequence number included, in one call, and only then shows the
new head; the reader copies slots and then looks at the head again: what the writer may have been overwriting
meanwhile is dropped and counted.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.device.monitor.clock import forward_ns

SLOTS = 2048
ABSENT = -1.0
"""Of a measure that cannot be negative: there is none."""
DONE, ABNORMAL, FAILED, SKIPPED = 0, 1, 2, 3
"""Kinds of a record: an answer; one not finite or of a wrong shape; an error; a frame not inferred."""

RECORD = np.dtype(
    [
        ("sequence", "<u8"),  # 1 for the first record ever written; 0 in a slot that never was
        ("time_ns", "<i8"),  # of the forward clock, at the end of the inference
        ("latency_ms", "<f8"),
        ("confidence", "<f8"),
        ("input_mean", "<f8"),
        ("input_std", "<f8"),
        ("label", "<i4"),
        ("kind", "<u4"),
    ]
)
_SLOT = struct.Struct("<QqddddiI")
_SLOT_BYTES = _SLOT.size
assert RECORD.itemsize == _SLOT_BYTES
Records = npt.NDArray[Any]
"""[n] of RECORD."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What the worker found."""

    records: Records
    """Whole ones, in order."""
    overwritten: int
    """Lost since the time before."""
    head: int
    """Records written when this was read, lost ones included."""


class Ring:
    """The buffer; `write` from one thread only, `drain` from one other."""

    def __init__(self, slots: int = SLOTS) -> None:
        """With room for this many records, a power of two."""
        if slots < 2 or slots & (slots - 1):
            raise ValueError(f"a ring of {slots} slots: a power of two is needed")
        self._slots = slots
        self._mask = slots - 1
        self._buffer = bytearray(slots * _SLOT.size)
        self._view: Records = np.frombuffer(self._buffer, dtype=RECORD)
        self._pack = _SLOT.pack_into
        self._tail = 0
        self.head = 0
        """Records written so far."""

    def write(  # noqa: PLR0917 - keywords cost time, and this runs on the inference thread
        self,
        kind: int,
        latency_ms: float,
        confidence: float,
        label: int,
        input_mean: float,
        input_std: float,
    ) -> None:
        """One record, stamped now. Never waits, never fails on numbers."""
        head = self.head
        self._pack(
            self._buffer,
            (head & self._mask) * _SLOT_BYTES,
            head + 1,
            forward_ns(),
            latency_ms,
            confidence,
            input_mean,
            input_std,
            label,
            kind,
        )
        self.head = head + 1

    def drain(self) -> Drained:
        """Everything written since the last call that is still there."""
        head = self.head
        first = max(self._tail, head - self._slots)
        places = np.arange(first, head, dtype=np.int64)
        records = self._view[places & self._mask]
        # The writer may be filling the slot of record `self.head` right now: that is also the slot of the one
        # a whole ring before it.
        kept = (places > self.head - self._slots) & (records["sequence"] == places.astype(np.uint64) + 1)
        overwritten = first - self._tail + int(np.count_nonzero(~kept))
        self._tail = head
        return Drained(records[kept], overwritten, head)
