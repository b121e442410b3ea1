"""Stage probe: who the device is, in stable facts only. It always runs; the benchmark depends on its report.

DVC's run cache restores old measurements for unchanged inputs; the device has to be one of the inputs, or a
latency from another machine comes back. Temperature and load are no identity: they are measured values.
"""

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from fleet.device.engine import ENGINE_VERSION
from fleet.device.errors import UserError
from tasks.stage import REPORTS, Params, stage


class ProbeParams(Params):
    """Nothing to set: which devices there are is the graph's matrix."""


_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "asimd", "asimddp", "i8mm", "fphp")


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
    try:
        return (
            Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
        )
    except OSError:
        return "not exposed"


def probe_local() -> dict[str, Any]:
    """This host's identity: SoC, memory, OS build, engine version, governor."""
    cpu, flags = _cpu()
    return {
        "device": "local",
        "soc": cpu,
        "cpu_flags": " ".join(flags),
        "cores_count": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "machine": platform.machine(),
        "os_build": f"{platform.system()} {platform.release()}",
        "engine_version": ENGINE_VERSION,
        "governor": _governor(),
    }


def main() -> None:
    """`python -m tasks.probe DEVICE` writes reports/probe/DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    device = parser.parse_args().device
    with stage(f"probe-{device}", ProbeParams, section="probe") as run:
        if device != "local":
            raise UserError(
                f"device {device!r}",
                allowed="local (this host)",
                next_step="remove the other names from `devices` in params.yaml",
            )
        run.report(probe_local(), file=REPORTS / "probe" / f"{device}.json")


if __name__ == "__main__":
    main()
