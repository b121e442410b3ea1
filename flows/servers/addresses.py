"""Where the pages answer: links written into a build's record must still lead there after a restart.

`edgeloop ui` keeps to the ports it had before (`.edgeloop/ui.json`), so a link stays good while it runs. A
build that runs without it writes the same links: whoever reads them reads them through `edgeloop ui`.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.servers.process import HOST
from tasks.stage import write_json
from tasks.tracking import is_server, state_folder, tracking_uri

_FILE = "ui.json"
_OPEN = range(1024, 65536)
"""Ports that need no privilege."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports on the loopback."""

    mlflow: int = 5000
    reports: int = 5050


def remembered(folder: Path) -> Ports:
    """The ports that `edgeloop ui` had last, the usual ones when it never ran or its file is damaged."""
    try:
        ports = Ports(**json.loads((state_folder(folder) / _FILE).read_text(encoding="utf-8")))
        valid = all(type(port) is int and port in _OPEN for port in asdict(ports).values())
    except (OSError, ValueError, TypeError):
        return Ports()
    return ports if valid else Ports()


def remember(folder: Path, ports: Ports) -> None:
    """Keep the ports for the next start and for links."""
    write_json(state_folder(folder) / _FILE, asdict(ports))


def mlflow_url(folder: Path) -> str:
    """Where MLflow's pages are: its server's when it has one, else the one that `edgeloop ui` starts."""
    uri = tracking_uri(folder)
    if is_server(uri):
        return re.sub(r"(?<=://)[^/]*@", "", uri.partition("?")[0]).rstrip("/")  # no password into a link
    return f"http://{HOST}:{remembered(folder).mlflow}"


def reports_url(folder: Path) -> str:
    """Where `edgeloop ui` serves the reports."""
    return f"http://{HOST}:{remembered(folder).reports}"
