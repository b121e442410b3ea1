"""`edgeloop fleet`: the gateway that devices speak to. Imports nothing heavy until called."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from fleet.device.errors import UserError
from flows.simulate_cli import simulate
from tasks.terminal import plain
from tasks.workspace import repository

if TYPE_CHECKING:
    from fleet.gateway.devices import Device

AsJson = Annotated[bool, Parameter(name="--json", negative="")]
Flag = Annotated[bool, Parameter(negative="")]
_MOST_ENROLMENTS_PER_S = 100_000

fleet = App(name="fleet", help="The gateway: devices enrol, send windows, and fetch releases and policies.")
fleet.command(simulate)


def _state(folder: Path | None) -> Path:
    return folder if folder is not None else repository() / ".edgeloop" / "fleet"


@fleet.command
def serve(
    *,
    folder: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8480,
    certfile: Path | None = None,
    keyfile: Path | None = None,
    releases: Path | None = None,
    classifier: Path | None = None,
    insecure: Flag = False,
    open_pages: Flag = False,
    enrolments_per_s: float | None = None,
) -> int:
    """Serve devices, and the fleet page for this machine, until Ctrl-C.

    Args:
        folder: Where the gateway keeps its state. Default: .edgeloop/fleet of the repository.
        host: Address to listen on; others than this machine's need TLS.
        port: Its port; 0 takes a free one.
        certfile: TLS certificate chain, PEM.
        keyfile: Its private key, PEM.
        releases: The TUF repository to serve, with metadata/ and targets/.
        classifier: An .mnn file with its card.json beside it: answers hard samples of devices with consent.
        insecure: Listen beyond this machine without TLS, because a proxy in front does it.
        open_pages: Show the fleet page and the metrics to other machines, too.
        enrolments_per_s: Most that one address may enrol. Default: 1 in 5 seconds; more for many behind
            one address, and for `edgeloop fleet simulate`.
    """
    from fleet.gateway.limits import Limits
    from fleet.gateway.serve import serve as run

    limits = Limits()
    if enrolments_per_s is not None:
        _check_rate(enrolments_per_s)
        burst = max(limits.enrolments_burst, math.ceil(enrolments_per_s))
        limits = replace(limits, enrolments_per_s=enrolments_per_s, enrolments_burst=burst)

    return run(
        _state(folder),
        host=host,
        port=port,
        certfile=certfile,
        keyfile=keyfile,
        repository=releases,
        insecure=insecure,
        open_pages=open_pages,
        classifier=classifier,
        limits=limits,
    )


def _check_rate(per_s: float) -> None:
    if not 0 < per_s <= _MOST_ENROLMENTS_PER_S:
        raise UserError(
            f"--enrolments-per-s {per_s:g}",
            allowed=f"more than 0, at most {_MOST_ENROLMENTS_PER_S:,}",
            next_step="leave it out for 1 in 5 seconds",
        )


@fleet.command
def token(*, folder: Path | None = None, count: int = 1, hours: float = 24.0, as_json: AsJson = False) -> int:
    """Make one-time tokens, each enrols one device. They are shown now and never again.

    Args:
        folder: Where the gateway keeps its state. Default: .edgeloop/fleet of the repository.
        count: How many.
        hours: How long they work.
        as_json: Print them as JSON.
    """
    from fleet.gateway.serve import token as make

    made = make(_state(folder), count=count, hours=hours)
    print(json.dumps({"tokens": made}) if as_json else "\n".join(made))
    return 0


@fleet.command
def revoke(device: str, *, folder: Path | None = None) -> int:
    """Refuse a device from its next request on, as when its key was stolen.

    Args:
        device: Its id.
        folder: Where the gateway keeps its state. Default: .edgeloop/fleet of the repository.
    """
    from fleet.gateway.serve import revoke as run

    run(_state(folder), device)
    print(f"{plain(device)} is refused from now on; a new key needs a new token")
    return 0


@fleet.command
def devices(*, folder: Path | None = None, as_json: AsJson = False) -> int:
    """List the devices that are enrolled.

    Args:
        folder: Where the gateway keeps its state. Default: .edgeloop/fleet of the repository.
        as_json: Print them as JSON.
    """
    from fleet.gateway.serve import devices as every

    found = every(_state(folder))
    if as_json:
        print(json.dumps([_record(device) for device in found], indent=1))
        return 0
    for device in found:
        state = "enrolled" if device.revoked_ms is None else f"revoked {_day(device.revoked_ms)}"
        print(f"{device.device}  {_day(device.enrolled_ms)}  {state}  {plain(device.model)}")
    if not found:
        print("no device is enrolled; `edgeloop fleet token` lets one in")
    return 0


def _record(device: "Device") -> dict[str, Any]:
    return {
        "device": device.device,
        "model": device.model,
        "enrolled_ms": device.enrolled_ms,
        "revoked_ms": device.revoked_ms,
    }


def _day(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at_ms / 1000))
