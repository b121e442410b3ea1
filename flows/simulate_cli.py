"""`edgeloop fleet simulate`: a fleet in one process against a gateway. Imports nothing heavy until called."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fleet.device.errors import UserError
from tasks.terminal import plain
from tasks.workspace import repository

if TYPE_CHECKING:
    from fleet.simulator.fleet import Fleet
    from fleet.simulator.plan import Plan
    from fleet.simulator.tally import Tally

AsJson = Annotated[bool, Parameter(name="--json", negative="")]
_STRENGTH = 0.8
_QUIET_LINES = 10
"""Seconds between two lines of progress where they cannot be written over each other."""
_MADE_UP = "made up"
_INTERRUPTED = 130
_COLUMNS = ("devices", "made", "delivered", "waiting", "accepted", "duplicates", "quarantined")


def simulate(
    *,
    devices: int = 100,
    gateway: str = "http://127.0.0.1:8480",
    hours: float = 24.0,
    seed: int = 0,
    windows_per_hour: float = 2.0,
    faulty: int = 0,
    drifted: int = 0,
    speed: float = float("inf"),
    threads: int = 16,
    telemetry: Path | None = None,
    tokens: Path | None = None,
    folder: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Simulate devices that speak the real protocol to a gateway; their last hour ends now.

    Args:
        devices: How many.
        gateway: Its address.
        hours: Of simulated time.
        seed: The same windows for the same seed and beginning.
        windows_per_hour: Of a device, 100 inferences each.
        faulty: Devices with each kind of fault, stolen keys in pairs.
        drifted: Devices with each kind of drifted input.
        speed: Seconds of the simulation in a second. Default: as fast as it goes.
        threads: Connections.
        telemetry: telemetry.tar with recordings of real devices. Default: three classes that are made up.
        tokens: File with a token a line. Default: made in the state folder of a gateway on this machine.
        folder: That folder. Default: .edgeloop/fleet of the repository.
        as_json: Print the result as JSON.
    """
    from fleet.simulator.fleet import Fleet

    plan = _plan(
        telemetry,
        count=devices,
        hours=hours,
        seed=seed,
        windows_per_h=windows_per_hour,
        speed=speed,
        threads=threads,
        faulty=faulty,
        drifted=drifted,
    )
    fleet = Fleet(plan)
    token = _tokens(tokens, folder or repository() / ".edgeloop" / "fleet", fleet.identities)
    code = 0
    try:
        fleet.run(gateway, token, on_progress=_progress())
    except KeyboardInterrupt:
        code = _INTERRUPTED
    finally:
        print(file=sys.stderr)
    _print(fleet, str(telemetry or _MADE_UP), as_json=as_json)
    return code


def _plan(telemetry: Path | None, *, faulty: int, drifted: int, **given: Any) -> "Plan":
    from fleet.simulator.device_classes import device_classes
    from fleet.simulator.drift import KINDS, Drift
    from fleet.simulator.faults import ENDS_AS
    from fleet.simulator.made_up import made_up_classes, made_up_temperatures
    from fleet.simulator.phone import Temperatures
    from fleet.simulator.plan import Plan
    from fleet.simulator.traces import read_telemetry

    if telemetry is None:
        classes, temperatures = made_up_classes(), made_up_temperatures()
    else:
        recorded = read_telemetry(telemetry)
        classes, temperatures = device_classes(recorded), Temperatures(recorded.phone)
    plan = Plan(
        classes=classes,
        temperatures=temperatures,
        start_ms=time.time_ns() // 1_000_000 - round(given["hours"] * 3_600_000),
        faulty=dict.fromkeys(ENDS_AS, faulty),
        drifted={Drift(kind=kind, strength=_STRENGTH): drifted for kind in KINDS},
        **given,
    )
    plan.check()
    return plan


def _tokens(file: Path | None, folder: Path, count: int) -> Callable[[], str]:
    """Gives one after the other.

    Raises:
        UserError: too few, or nowhere to make them.
    """
    if file is not None:
        try:
            made = file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--tokens {file}: {error}",
                allowed="a text file with a token a line",
                next_step=f"edgeloop fleet token --count {count} > {file}, where the gateway runs",
            ) from error
    elif (folder / "gateway.sqlite").exists():
        from fleet.gateway.serve import token

        made = token(folder, count=count)
    else:
        raise UserError(
            f"{folder}, which is no gateway's state folder",
            allowed="the folder of a gateway on this machine, or --tokens FILE",
            next_step="start `edgeloop fleet serve`, or give the --folder that it has",
        )
    if len(made) < count:
        raise UserError(
            f"{len(made)} tokens for {count} devices",
            allowed="one for each device; two with a stolen key need one",
            next_step=f"edgeloop fleet token --count {count}",
        )
    left: Iterator[str] = iter(made)
    return lambda: next(left)


def _progress() -> Callable[[str], None]:
    """Lines on stderr: one that is written over on a terminal, one in ten elsewhere."""
    terminal, seen = sys.stderr.isatty(), 0

    def show(line: str) -> None:
        nonlocal seen
        seen += 1
        if terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif seen % _QUIET_LINES == 1:
            print(line, file=sys.stderr, flush=True)

    return show


def _print(fleet: "Fleet", classes: str, *, as_json: bool) -> None:
    groups, total = fleet.tallies(), fleet.tally()
    if as_json:
        record = {
            "classes": classes,
            "seed": fleet.plan.seed,
            "groups": {name: tally.record() for name, tally in groups.items()},
            "total": total.record(),
        }
        print(json.dumps(record, indent=1))
        return
    print(f"device classes: {plain(classes)}; windows, by what is wrong with the device")
    print(f"{'':12}" + "".join(f"{name:>12}" for name in _COLUMNS) + "  refused, failed, lost")
    for name, tally in [*groups.items(), ("all", total)]:
        print(f"{name:12}" + "".join(f"{getattr(tally, column):12}" for column in _COLUMNS) + _rest(tally))


def _rest(tally: "Tally") -> str:
    counted = {**tally.refused, **tally.failed, **tally.lost}
    return "  " + (", ".join(f"{count} {name}" for name, count in sorted(counted.items())) or "none")
