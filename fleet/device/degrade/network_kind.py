"""Which network carries the traffic, from /proc/net/route, /proc/net/ipv6_route and /sys/class/net."""

from pathlib import Path

from fleet.device.degrade.system_files import entries, read_text
from fleet.device.wire import Network

_ANYWHERE_V4, _ANYWHERE_V6 = "00000000", "0" * 32
_ETHERNET = "1"  # ARPHRD_ETHER, of include/uapi/linux/if_arp.h
_LOOPBACK = "lo"


def read_network(root: Path) -> Network:
    """The network of the default route; without one, none. `unknown` where the system does not say."""
    routes = read_text(root / "proc/net/route"), read_text(root / "proc/net/ipv6_route")
    if routes == (None, None):
        return "unknown"
    names = [*_default_v4(routes[0] or ""), *_default_v6(routes[1] or "")]
    cards = {card.name: card for card in entries(root / "sys/class/net")}
    kinds: list[Network] = [_kind(cards[name]) for name in names if name in cards and name != _LOOPBACK]
    return kinds[0] if kinds else "none"


def _default_v4(text: str) -> list[str]:
    """Interfaces with a default route, the one of the lowest metric first."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) >= 8 and words[1] == words[7] == _ANYWHERE_V4 and words[6].isdigit():
            found.append((int(words[6][:9]), words[0]))
    return [name for _, name in sorted(found)]


def _default_v6(text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 10 and words[0] == _ANYWHERE_V6 and words[1] == "00":
            found.append((words[5][:8], words[9]))
    return [name for _, name in sorted(found)]


def _kind(card: Path) -> Network:
    if read_text(card / "operstate") == "down":
        return "none"
    if (card / "wireless").is_dir() or (card / "phy80211").exists():
        return "wifi"
    # rmnet is Qualcomm's modem, which says nothing of itself in uevent.
    uevent = (read_text(card / "uevent") or "").split()
    if "DEVTYPE=wwan" in uevent or card.name.startswith(("wwan", "rmnet")):
        return "mobile"
    # A tunnel or a bridge is Ethernet to the kernel as well: what is under it is not known.
    return "ethernet" if read_text(card / "type") == _ETHERNET and (card / "device").exists() else "unknown"
