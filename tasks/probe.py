"""Stage probe: who the device is, in stable facts only. It always runs; the benchmark depends on its report.

DVC's run cache restores old measurements for unchanged inputs; the device has to be one of the inputs, or a
latency from another machine comes back.
"""

import argparse
from typing import Any

from fleet.device.identity import identity
from fleet.lab.devices import open_device
from tasks.stage import REPORTS, Params, stage


class ProbeParams(Params):
    """Nothing to set: which devices there are is the graph's matrix."""


def probe(device: str) -> dict[str, Any]:
    """The identity of a device: SoC, memory, OS build, engine version and size, governor.

    Raises:
        UserError: no device of that name.
        EngineError: the device does not answer.
    """
    return {"device": device, **open_device(device).run("fleet.device.identity", {})}


def probe_local() -> dict[str, Any]:
    """The same of this host, without starting a process: the build asks before it does anything."""
    return {"device": "local", **identity()}


def main() -> None:
    """`python -m tasks.probe DEVICE` writes reports/probe/DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    device = parser.parse_args().device
    with stage(f"probe-{device}", ProbeParams, section="probe") as run:
        run.report(probe(device), file=REPORTS / "probe" / f"{device}.json")


if __name__ == "__main__":
    main()
