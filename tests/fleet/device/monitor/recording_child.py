"""A process that records until it is killed: python recording_child.py FOLDER URL COUNTER.

COUNTER is a file of 8 bytes: how many were ever recorded, over all processes. The number of each inference
is the mean of its image, so that a window tells which inferences it holds.
"""

import mmap
import struct
import sys
import time
from pathlib import Path

from telling import AT_ONCE, ENVIRONMENT, VERSIONS, FixedSensors

from fleet.device.credentials import DeviceKey
from fleet.device.monitor import Monitor, uploader

if __name__ == "__main__":
    uploader._POLL_S = 0.1
    folder, url, counter = sys.argv[1:]
    with Path(counter).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    number = struct.unpack("<q", shared[:])[0]
    with Monitor(
        Path(folder),
        DeviceKey(bytes(range(32))),
        url,
        versions=VERSIONS,
        environment=ENVIRONMENT,
        sensors=FixedSensors(),
        upload=AT_ONCE,
    ) as monitor:
        while True:
            monitor.record(20.0, 0.9, 1, float(number))
            number += 1
            shared[:] = struct.pack("<q", number)
            time.sleep(0.0005)
