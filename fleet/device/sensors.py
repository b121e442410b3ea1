"""What a device knows of itself at a moment: one interface for Linux, phones and recorded traces."""

from dataclasses import dataclass
from typing import Protocol

from fleet.device.wire import Network


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One reading; None where the system does not expose it."""

    temperature_c: float | None = None
    battery_percent: float | None = None
    charging: bool | None = None
    network: Network = "unknown"
    memory_mb: float | None = None
    """Resident memory of this process, MiB."""
    available_mb: float | None = None
    """Memory this process can still take, MiB."""
    cpu_percent: float | None = None
    """Of one core, since the reading before."""
    power_w: float | None = None


class Sensors(Protocol):
    """Where readings come from."""

    def read(self) -> Reading:
        """What is so now; cheap enough for once a second, never raises for what is not exposed."""
        ...
