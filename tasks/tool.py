"""The frame of an analysis that is no stage: it runs in a workspace, on demand, and hashes to nothing.

A tool module is pure functions plus a `main()` whose body stands inside `tool(NAME)`.
"""

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from fleet.device.errors import INTERRUPTED, EdgeloopError
from tasks.stage import read_params
from tasks.terminal import plain_lines
from tasks.workspace import check_environment, disk_full, only_process

RAW = argparse.RawDescriptionHelpFormatter
"""Keeps the lines of a module's docstring as they are in `--help`."""


@contextlib.contextmanager
def tool(name: str, *, as_json: bool = False) -> Iterator[None]:
    """Errors become one message and exit code 2 or 3; Ctrl-C and SIGTERM exit 130 and leave no child behind.

    Args:
        name: In messages, and of the lock: one process of a tool at a time in a workspace.
        as_json: Failures go to stdout as JSON, too.

    Raises:
        SystemExit: the work failed or was interrupted.
    """
    previous = signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        check_environment()
        read_params()  # before the lock makes a folder: this may be no workspace
        with only_process(name):
            yield
    except EdgeloopError as error:
        _end(name, error, as_json=as_json)
    except KeyboardInterrupt:
        _tell(name, "interrupted", INTERRUPTED, as_json=as_json)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:  # a bug, unless the disk is full: libraries call that by many names
        if full := disk_full(error, Path()):
            _end(name, full, as_json=as_json)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def print_json(values: Any) -> None:
    """The result for programs, on stdout."""
    print(json.dumps(values, indent=1, sort_keys=True, allow_nan=False))


def _as_ctrl_c(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _end(name: str, error: EdgeloopError, *, as_json: bool) -> NoReturn:
    _tell(name, str(error), error.exit_code, as_json=as_json)
    raise SystemExit(error.exit_code) from error


def _tell(name: str, what: str, exit_code: int, *, as_json: bool) -> None:
    print(plain_lines(f"{name}: {what}"), file=sys.stderr)
    if as_json:
        print_json({"ok": False, "error": what, "exit_code": exit_code})
