"""Whether an address is this machine's: what is sent there needs no encryption."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host name or address leads to this machine whatever a resolver says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
