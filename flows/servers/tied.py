"""The first step of a server: a script that ties its process to its parent and then becomes the server.

    python tied.py PARENT_PID ARGV...

A parent that is killed can stop nothing any more, so the kernel does it. The standard library only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Ask to be terminated when the parent ends, however it ends, and go over to ARGV."""
    if sys.platform == "linux":  # elsewhere only the watch of the parent itself ends a server
        # SIGTERM and not SIGKILL: MLflow's command passes it on to the server it has started.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(sys.argv[1]):  # it ended before that
            sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - an argument list, and what the parent asked for


if __name__ == "__main__":
    main()
