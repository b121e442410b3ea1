"""What was measured and is not in any window, counted until a window carries the count."""

import threading
from dataclasses import fields

from fleet.device.wire import Loss

_NAMES = tuple(field.name for field in fields(Loss))


def together(*losses: Loss) -> Loss:
    """The sum of losses."""
    return Loss(**{name: sum(getattr(loss, name) for loss in losses) for name in _NAMES})


class LossCounter:
    """Counts from any thread but that of the inferences."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = Loss()

    def add(self, loss: Loss) -> None:
        """Count what was lost."""
        with self._lock:
            self._open = together(self._open, loss)

    @property
    def is_open(self) -> bool:
        """Whether something was counted that no window carries yet."""
        return self._open != Loss()

    def take(self) -> Loss:
        """All that was counted since the last call."""
        with self._lock:
            taken, self._open = self._open, Loss()
        return taken
