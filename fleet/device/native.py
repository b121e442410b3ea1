"""The MNN module itself, imported in silence: stdout belongs to results."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

__all__ = ["ENGINE_VERSION", "MNN", "quiet_stdout"]

_redirection = threading.Lock()
_redirected = 0
_real_stdout = -1


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send what native code prints on stdout to stderr: stdout belongs to `--json` output.

    The redirection is the whole process's: of overlapping threads the first sets it and the last ends it.
    """
    global _redirected, _real_stdout  # noqa: PLW0603 - file descriptor 1 is as global
    with _redirection:
        if _redirected == 0:
            sys.stdout.flush()
            _real_stdout = os.dup(1)
            os.dup2(2, 1)
        _redirected += 1
    try:
        yield
    finally:
        with _redirection:
            _redirected -= 1
            if _redirected == 0:
                ctypes.CDLL(None).fflush(None)  # else C's buffer comes out at exit, after the results
                os.dup2(_real_stdout, 1)
                os.close(_real_stdout)


with quiet_stdout():  # the import itself prints a line
    import MNN

ENGINE_VERSION: str = MNN.version()
