"""A spool in memory: what a simulated device has instead of files. As bounded as the real one."""

import contextlib
import zlib
from collections.abc import Iterable, Iterator

from fleet.device.monitor.encoding import encode_window
from fleet.device.monitor.loss import LossCounter
from fleet.device.wire import Loss, Window
from fleet.simulator.tally import Tally


class MemorySpool:
    """Encoded windows of one device, by their numbers."""

    def __init__(self, loss: LossCounter, tally: Tally, *, most_windows: int) -> None:
        """When it is full the oldest window without anomalies makes room, else the oldest, and is counted."""
        self._loss, self._tally, self._most = loss, tally, most_windows
        self._contents: dict[int, tuple[bytes, bool]] = {}

    def put(self, window: Window) -> None:
        """Keep one, compressed: many devices have little memory together."""
        if len(self._contents) >= self._most:
            oldest = next(iter(self._contents))
            calm = (number for number, (_, anomalous) in self._contents.items() if not anomalous)
            self._lose(next(calm, oldest), "spool full")
        content = zlib.compress(encode_window(window), 1)
        self._contents[window.sequence] = content, bool(window.anomalies)
        self._tally.waiting += 1

    def waiting(self) -> dict[int, bool]:
        """Numbers in order, and whether a window has anomalies."""
        return {number: anomalous for number, (_, anomalous) in self._contents.items()}

    @contextlib.contextmanager
    def in_flight(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Keep these for the block: with one thread nothing goes."""
        yield list(numbers)

    def read(self, number: int) -> bytes | None:
        """An encoded window; None when it is gone."""
        found = self._contents.get(number)
        return zlib.decompress(found[0]) if found is not None else None

    def remove(self, numbers: Iterable[int]) -> None:
        """They were taken."""
        for number in numbers:
            del self._contents[number]
            self._tally.delivered += 1
            self._tally.waiting -= 1

    def put_aside(self, number: int, why: str) -> None:
        """It will not be taken: forgotten and counted."""
        self._lose(number, why)

    def _lose(self, number: int, why: str) -> None:
        del self._contents[number]
        self._loss.add(Loss(dropped_windows=1))
        self._tally.lost[why] += 1
        self._tally.waiting -= 1
