"""Sensors that say again what a phone once said: one row a second, at any speed.

The traces have the columns Timestamp (HH:MM:SS), CPU_Load, Freq0_MHz, Freq7_MHz, RAM_Used_MB, Temp_C,
Battery_Perc, Voltage_mV. RAM_Used_MB is the phone's, not a process's, and CPU_Load is in a unit that the
recording does not name: neither becomes a Reading.
"""

import bisect
import csv
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fleet.device.errors import UserError
from fleet.device.sensors import Reading
from fleet.device.wire import Network

COLUMNS = ("Timestamp", "Freq0_MHz", "Freq7_MHz", "RAM_Used_MB", "Temp_C", "Battery_Perc", "Voltage_mV")
_DAY_S = 86_400
_MOST_ROWS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePoint:
    """One row of a trace."""

    at_s: float
    """Since the first row."""
    temperature_c: float
    battery_percent: float
    clock_mhz: float
    """Of the fast cores."""
    voltage_mv: float
    ram_used_mb: float
    """Of the whole phone."""


def read_trace(path: Path) -> tuple[TracePoint, ...]:
    """The trace in a CSV file.

    Raises:
        UserError: it is no such trace.
    """
    try:
        with path.open(encoding="ascii", newline="") as file:
            return parse_trace(file, name=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"{path}: {error}") from error


def parse_trace(lines: Iterable[str], *, name: str) -> tuple[TracePoint, ...]:
    """The trace in the lines of a CSV; times that pass midnight go on.

    Raises:
        UserError: a column is missing, a value no number, a time goes back, or there are no rows.
    """
    reader = csv.DictReader(lines)
    if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
        raise _wrong(f"{name} without column {', '.join(missing)}")
    points: list[TracePoint] = []
    first_s = 0.0
    try:
        for row in reader:
            at_s = _seconds(row["Timestamp"])
            first_s = first_s if points else at_s
            point = _point(row, (at_s - first_s) % _DAY_S)
            if len(points) >= _MOST_ROWS or not all(map(math.isfinite, _numbers(point))):
                raise _wrong(f"{name}, line {reader.line_num}")
            points.append(point)
    except (ValueError, TypeError, csv.Error) as error:
        raise _wrong(f"{name}, line {reader.line_num}: {error}") from error
    if not points or any(later.at_s <= before.at_s for before, later in pairwise(points)):
        raise _wrong(f"{name}: {len(points)} rows, or times that do not grow")
    return tuple(points)


def _seconds(text: str) -> float:
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return float(hours * 3600 + minutes * 60 + seconds)


def _point(row: dict[str, str], at_s: float) -> TracePoint:
    return TracePoint(
        at_s=at_s,
        temperature_c=float(row["Temp_C"]),
        battery_percent=float(row["Battery_Perc"]),
        clock_mhz=max(float(row["Freq0_MHz"]), float(row["Freq7_MHz"])),
        voltage_mv=float(row["Voltage_mV"]),
        ram_used_mb=float(row["RAM_Used_MB"]),
    )


def _numbers(point: TracePoint) -> tuple[float, ...]:
    return (
        point.temperature_c,
        point.battery_percent,
        point.clock_mhz,
        point.voltage_mv,
        point.ram_used_mb,
    )


def _wrong(got: str) -> UserError:
    return UserError(
        got,
        allowed=f"a CSV with the columns {', '.join(COLUMNS)}: finite numbers, HH:MM:SS that grow",
        next_step="record the trace again, one row a second",
    )


class TraceSensors:
    """`fleet.device.sensors.Sensors` from a trace, from its beginning again when it ends."""

    def __init__(
        self,
        trace: tuple[TracePoint, ...],
        *,
        speed: float = 1.0,
        start_s: float = 0.0,
        network: Network = "wifi",
        charging: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now.

        Args:
            trace: At least one point.
            speed: Seconds of the trace in a second of the clock.
            start_s: Where in the trace to begin.
            network: A trace says nothing of it.
            charging: Nor of this.
            clock: Monotonic seconds.
        """
        if not trace or not (math.isfinite(speed) and speed > 0 and math.isfinite(start_s)):
            raise UserError(
                f"a trace of {len(trace)} points at speed {speed} from {start_s} s",
                allowed="at least one point, a positive speed",
                next_step="give the sensors a trace that `read_trace` returned",
            )
        self._trace, self._times = trace, [point.at_s for point in trace]
        self._speed, self._start_s, self._clock = speed, start_s, clock
        self._network, self._charging = network, charging
        self._began_s = clock()

    def read(self) -> Reading:
        """The row that is due."""
        point = self.now()
        return Reading(
            temperature_c=point.temperature_c,
            battery_percent=point.battery_percent,
            charging=self._charging,
            network=self._network,
        )

    def now(self) -> TracePoint:
        """The row that is due, with what a Reading does not hold."""
        at_s = self._start_s + (self._clock() - self._began_s) * self._speed
        # A trace lasts one step longer than its last row.
        whole_s = self._times[-1] + 1.0
        return self._trace[bisect.bisect_right(self._times, at_s % whole_s) - 1]
