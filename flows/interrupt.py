"""Being interrupted: SIGTERM of a service manager and SIGHUP of a closed terminal end a command as Ctrl-C."""

import contextlib
import os
import signal
import sys
from typing import NoReturn

from fleet.device.errors import INTERRUPTED


def as_ctrl_c() -> None:
    """Let other signals interrupt as Ctrl-C does; what is ignored, as under `nohup`, stays ignored."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, signal.default_int_handler)


def leave(said: str = "interrupted") -> NoReturn:
    """End at once, with all this process started, but for what has a session of its own.

    Unwinding would take long: Prefect tells its server of the interruption for over a minute, which a
    terminal has interrupted too. Stages may end anywhere, and MLflow's writer lives on to say that they did.
    """
    import psutil

    print(f"edgeloop: {said}", file=sys.stderr, flush=True)
    session = os.getsid(0)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(child.pid) == session:
                child.terminate()
    os._exit(INTERRUPTED)
