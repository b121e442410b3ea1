"""Child processes that may crash, hang or eat memory: limited, ended with all they started, heard to the end.

One way to run native code that is not trusted with the caller's process: MNN's converter, both engines of a
parity run, and the benchmark.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LIMITS = Path(__file__).with_name("child_limits.py")
_SPARE_CPU_S = 60  # the clock ends a child; the CPU limit is for one whose parent was killed
PAST_LIMIT = "ran past its limit"
"""How `Ended.failure` begins of a child that took too long."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a child may take; None for no limit."""

    memory_bytes: int | None = 16 << 30
    """Of address space, on Linux: a small graph can ask for terabytes."""
    file_bytes: int | None = 4 << 30
    """Of the largest file."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a child."""

    stdout: str
    stderr: str
    failure: str
    """Empty for exit code 0, else how it ended: `exited with 1`, `crashed with SIGSEGV`, `ran past its limit
    of 60 s`.
    """

    @property
    def said(self) -> str:
        """All it printed, stderr last."""
        return self.stdout + self.stderr


def run_child(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> Ended:
    """Run a program to its end, at the latest to its time limit, in a process group of its own.

    Args:
        argv: Absolute path of the program, and its arguments.
        timeout_s: Wall-clock limit; past it the child and all it started are killed.
        cwd: Its working directory; this process's when None.
        env: Variables added to this process's.
        limits: What it may take; the defaults of `Limits` when None.
    """
    limits = limits or Limits()
    cpu_s = (int(timeout_s) + _SPARE_CPU_S) * (os.cpu_count() or 1)
    bounds = (limits.memory_bytes, limits.file_bytes, cpu_s)
    first = [sys.executable, "-I", "-S", str(_LIMITS), *(str(-1 if n is None else n) for n in bounds)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(
            [*first, *argv],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        failure = ""
        try:
            failure = _how(child.wait(timeout_s))
        except subprocess.TimeoutExpired:
            failure = f"{PAST_LIMIT} of {timeout_s:g} s"
        finally:  # a KeyboardInterrupt, too, leaves nothing running
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        said = []
        for sink in (out, err):
            sink.seek(0)
            said.append(sink.read().decode("utf-8", "replace"))
    return Ended(stdout=said[0], stderr=said[1], failure=failure)


def _how(code: int) -> str:
    if code >= 0:
        return f"exited with {code}" if code else ""
    try:
        return f"crashed with {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"crashed with signal {-code}"
