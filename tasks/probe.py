"""Stage probe: who the device is, in stable facts only. It always runs; the benchmark depends on its report.

DVC's run cache restores old measurements for unchanged inputs; the device has to be one of the inputs, or a
latency from another machine comes back. Temperature and load are no identity: they are measured values.

Two hosts of one CPU model are two hosts: `host` tells them apart and lies in git, so it is a hash under a key
of this project, of which nobody gets the machine's own id back.
"""

import argparse
import contextlib
import hashlib
import hmac
import os
import platform
import tempfile
import uuid
from pathlib import Path
from typing import Any

import psutil

from fleet.device.engine import ENGINE_VERSION
from fleet.device.errors import UserError
from tasks.stage import REPORTS, Params, stage
from tasks.workspace import CODE


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


_HOST_KEY = b"edgeloop host identity, version 1"
_HOST_DIGITS = 16
_MACHINE_ID = Path("/etc/machine-id")
_NETWORK = Path("/sys/class/net")
_KEPT_ID = CODE / ".edgeloop" / "host_id"
_PERMANENT = "0"  # addr_assign_type of a card's own address, neither random nor set by somebody


def host_id(machine_id: Path = _MACHINE_ID, network: Path = _NETWORK, kept_id: Path = _KEPT_ID) -> str:
    """Who this host is, the same after a reboot and for every user; a hash that does not give the parts away.

    From the operating system's machine id and the own addresses of the built-in network cards: a cloned disk
    image has the same id but other cards. A container has neither; then a random id is kept beside the code,
    not in git, so that each clone of the repository is a host of its own.
    """
    with contextlib.suppress(OSError):
        if known := machine_id.read_text(encoding="ascii").strip():
            return _hashed([known, *_card_addresses(network)])
    with contextlib.suppress(OSError):
        return _hashed([_kept(kept_id)])
    return "unknown"


def _hashed(parts: list[str]) -> str:
    return hmac.new(_HOST_KEY, "\n".join(parts).encode(), hashlib.sha256).hexdigest()[:_HOST_DIGITS]


def _card_addresses(network: Path) -> list[str]:
    """Of cards that belong to the machine: those on USB come and go."""
    found = []
    for card in sorted(network.glob("*")):
        device = (card / "device").resolve()
        with contextlib.suppress(OSError):
            own = (card / "addr_assign_type").read_text(encoding="ascii").strip() == _PERMANENT
            if own and device.is_dir() and not any(part.startswith("usb") for part in device.parts):
                found.append((card / "address").read_text(encoding="ascii").strip())
    return sorted(found)


def _kept(path: Path) -> str:
    """The random id in a file, made when it is missing; two that make it at once get the same."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii") as made:
            made.write(uuid.uuid4().hex)
            made.flush()
            with contextlib.suppress(FileExistsError):
                os.link(made.name, path)
    return path.read_text(encoding="ascii")


def probe_local() -> dict[str, Any]:
    """This host's identity: which one it is, SoC, memory, OS build, engine version, governor."""
    cpu, flags = _cpu()
    return {
        "device": "local",
        "host": host_id(),
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
