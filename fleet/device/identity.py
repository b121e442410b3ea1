"""Who a device is, in stable facts only: `python -m fleet.device.identity {}`.

Temperature and load are no identity: they are measured values.
"""

import os
import platform
from importlib.metadata import files
from pathlib import Path
from typing import Any

from fleet.device.engine import ENGINE_VERSION
from fleet.device.program import answer

_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "asimd", "asimddp", "i8mm", "fphp")
_ENGINE_FILES = ("_mnncengine.", "mnn.libs/")  # of the wheel; its converter does not go to a device


def identity() -> dict[str, Any]:
    """SoC, memory, OS build, engine version and size, governor."""
    cpu, flags = _cpu()
    return {
        "soc": cpu,
        "cpu_flags": " ".join(flags),
        "cores_count": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "machine": platform.machine(),
        "os_build": f"{platform.system()} {platform.release()}",
        "engine_version": ENGINE_VERSION,
        "engine_bytes": engine_bytes(),
        "governor": _governor(),
    }


def engine_bytes() -> int:
    """Size of the engine's shared libraries: what an app ships beside a model."""
    installed = [file for file in files("MNN") or () if str(file).startswith(_ENGINE_FILES)]
    return sum(Path(str(file.locate())).stat().st_size for file in installed)


def _cpu() -> tuple[str, list[str]]:
    """CPU model name and the instruction sets that matter to the engine."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor(), []
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    name = fields.get("model name") or fields.get("Hardware") or platform.processor()
    return name, [flag for flag in _CPU_FLAGS if flag in flags]


def _governor() -> str:
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return "not exposed"


if __name__ == "__main__":
    answer(lambda _options: identity())
