"""Which host this is, among hosts of one CPU model: a hash that lies in git and gives nothing away.

Made under a key of this project, so that nobody gets the machine's own id back, or the same hash elsewhere.
"""

import contextlib
import hashlib
import hmac
import os
import tempfile
import uuid
from pathlib import Path

_HOST_KEY = b"edgeloop host identity, version 1"
_HOST_DIGITS = 16
_MACHINE_ID = Path("/etc/machine-id")
_NETWORK = Path("/sys/class/net")
_KEPT_ID = Path(__file__).resolve().parents[2] / ".edgeloop" / "host_id"
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
