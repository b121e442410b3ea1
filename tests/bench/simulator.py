"""What simulated devices cost: windows a second, alone and against a gateway, and memory of a large fleet.

    python tests/bench/simulator.py --devices 10000 --hours 3 --rounds 3

The gateway is a process on the same machine, so that both share its cores.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "fleet" / "gateway"))

import gateway_kit as kit

from fleet.gateway import serve
from fleet.simulator.fleet import Fleet
from fleet.simulator.made_up import made_up_classes, made_up_temperatures
from fleet.simulator.plan import Plan

OVER_HTTP_DEVICES, OVER_HTTP_HOURS = 500, 24.0


def rss_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def plan(devices: int, hours: float, seed: int) -> Plan:
    """Devices of the made-up classes whose time ends now."""
    return Plan(
        count=devices,
        classes=made_up_classes(),
        temperatures=made_up_temperatures(),
        start_ms=kit.now_ms() - int(hours * 3_600_000),
        hours=hours,
        seed=seed,
    )


def memory(devices: int, hours: float) -> list[dict[str, Any]]:
    """Of a large fleet: made, and after hours without a network."""
    before_mib, began_s = rss_mib(), time.perf_counter()
    fleet = Fleet(plan(devices, hours, seed=0))
    made_s, made_mib = time.perf_counter() - began_s, rss_mib()
    for device in fleet.devices:
        device.measure(hours * 3600)
    waiting = fleet.tally().waiting
    return [
        row("memory of the process before", before_mib, "MiB", "1"),
        row("devices made", made_s, "s", f"{devices} devices"),
        row("memory with the devices", made_mib, "MiB", f"{devices} devices"),
        row(f"memory after {hours:g} h without a network", rss_mib(), "MiB", f"{waiting} windows wait"),
    ]


def alone(rounds: int) -> list[dict[str, Any]]:
    """Windows drawn, built, encoded and compressed, one thread, nothing sent."""
    rates = []
    for seed in range(rounds):
        fleet = Fleet(plan(100, 24.0, seed))
        began_s = time.perf_counter()
        for device in fleet.devices:
            device.measure(24 * 3600)
        rates.append(fleet.tally().made / (time.perf_counter() - began_s))
    return [row("windows made a second, nothing sent", statistics.median(rates), "1/s", f"{rounds} rounds")]


def against_a_gateway(rounds: int) -> list[dict[str, Any]]:
    """A simulated day, as fast as it goes; both accounts must agree."""
    made, devices, requests = [], [], []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as folder, kit.gateway(Path(folder) / "state") as gateway:
            fleet = Fleet(plan(OVER_HTTP_DEVICES, OVER_HTTP_HOURS, seed))
            tokens = iter(serve.token(gateway.folder, count=fleet.identities))
            began_s = time.perf_counter()
            fleet.run(f"http://127.0.0.1:{gateway.port}", lambda left=tokens: next(left))  # type: ignore[misc]
            took_s, tally = time.perf_counter() - began_s, fleet.tally()
            stored = kit.windows_in(gateway.folder)
            if len(stored) != tally.accepted or max(stored.values()) > 1:
                raise SystemExit(f"devices say {tally.accepted}, the gateway has {len(stored)}")
        made.append(tally.made / took_s)
        requests.append(tally.requests / took_s)
        devices.append(OVER_HTTP_DEVICES * OVER_HTTP_HOURS / (took_s / 3600))
    said = f"{rounds} days of {OVER_HTTP_DEVICES} devices"
    return [
        row("with a gateway: windows made a second", statistics.median(made), "1/s", said),
        row("with a gateway: signed requests a second", statistics.median(requests), "1/s", said),
        row(
            "with a gateway: devices that could live at their own pace",
            statistics.median(devices),
            "devices",
            said,
        ),
        row("windows the two accounts differ by", 0, "windows", said),
    ]


def row(what: str, value: float, unit: str, n: str) -> dict[str, Any]:
    """Of the table."""
    return {"what": what, "value": value, "unit": unit, "n": n}


def main() -> None:
    """Measure and write docs/results/simulator.{json,md}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    large = memory(given.devices, given.hours)
    from report import FOLDER, conditions, write  # with torch, that memory would be counted

    said = conditions(
        classes="made up", windows_an_hour_of_a_device=2, threads=16, transport="HTTP on the loopback"
    )
    write(
        FOLDER / "simulator.json",
        {
            "title": "Simulator: what simulated devices cost",
            "command": f"python tests/bench/simulator.py --devices {given.devices} --hours {given.hours:g} "
            f"--rounds {given.rounds}",
            "text": "One process with all devices; the gateway is another on the same machine. Medians of "
            "few rounds, on a machine that others used too: see its load.",
            "conditions": said,
            "rows": [*large, *alone(given.rounds), *against_a_gateway(given.rounds)],
        },
    )


if __name__ == "__main__":
    main()
