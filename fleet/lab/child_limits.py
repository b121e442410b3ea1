"""The first step of every guarded child: a script that limits its process and then becomes the real one.

    python child_limits.py MEMORY_BYTES FILE_BYTES CPU_S ARGV...

A limit of -1 is none. The standard library only, and little of it: it costs every child its start.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _limit(which: int, most: int) -> None:
    """Set a limit, or keep the one that this user has when that is tighter."""
    bounds = [b for b in (most, *resource.getrlimit(which)) if b != resource.RLIM_INFINITY and b >= 0]
    if bounds:
        resource.setrlimit(which, (min(bounds), min(bounds)))


def main() -> None:
    """Limit this process, tie it to its parent, and go over to ARGV."""
    memory_bytes, file_bytes, cpu_s = (int(n) for n in sys.argv[1:4])
    if sys.platform == "linux":  # elsewhere the CPU limit ends a child whose parent was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_CPU, cpu_s)
    _limit(resource.RLIMIT_CORE, 0)
    os.execv(sys.argv[4], sys.argv[4:])  # noqa: S606 - an argument list, and what the parent asked for


if __name__ == "__main__":
    main()
