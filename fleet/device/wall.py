"""The wall clock in the unit of everything that is sent or stored."""

import time


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
