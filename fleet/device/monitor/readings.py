"""The sensors, read at most once a second, whichever thread asks."""

import threading
import time

from fleet.device.sensors import Reading, Sensors

MOST_AGE_S = 1.0


class LatestReading:
    """Reads when the last reading is old."""

    def __init__(self, sensors: Sensors) -> None:
        """Of these sensors."""
        self._sensors = sensors
        self._lock = threading.Lock()
        self._reading: Reading | None = None
        self._read_s = 0.0

    def _read(self) -> Reading:
        """A sensor that raises, against its contract, exposes nothing: records must go on being counted."""
        try:
            return self._sensors.read()
        except Exception:  # noqa: BLE001  # an app's own code
            return Reading()

    def get(self) -> Reading:
        """A reading of this second; the same object until there is a newer one."""
        with self._lock:
            now_s = time.monotonic()
            if self._reading is None or now_s - self._read_s >= MOST_AGE_S:
                self._reading, self._read_s = self._read(), now_s
            return self._reading
