"""Loads, asks and unloads a device's release again and again, in a process that has nothing else in it.

    python tests/bench/runtime_cycles.py FOLDER ROOT_JSON CYCLES     prints one JSON object

FOLDER is a runtime's, with a release in it.
"""

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fleet.device.host import resident_mb  # as above
from fleet.device.runtime import DeviceInfo, Runtime

READINGS = 20


def main(folder: Path, root: bytes, cycles: int) -> dict[str, list[float] | float]:
    """Resident MiB and open files after each twentieth of the cycles, and ms a cycle."""
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    memory_mb, open_files = [], []
    with Runtime(folder, DeviceInfo.detect("bench"), root=root) as runtime:
        started = time.perf_counter()
        for cycle in range(cycles):
            runtime.predict(image)
            runtime.unload()
            if (cycle + 1) % (cycles // READINGS) == 0:
                gc.collect()
                memory_mb.append(resident_mb() or float("nan"))
                open_files.append(len(list(Path("/proc/self/fd").iterdir())))
        each_ms = (time.perf_counter() - started) * 1e3 / cycles
    return {"memory_mb": memory_mb, "open_files": open_files, "each_ms": each_ms}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), int(sys.argv[3]))))
