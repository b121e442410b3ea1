"""Files that are there whole or not at all, whenever the process or the power ends."""

import contextlib
import os
import tempfile
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a file that is being written; what a killed process leaves of these may be removed."""


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, its bytes and its name on the disk before this returns.

    Raises:
        OSError: it could not be; then nothing new is there.
    """
    # A name of its own: two processes that write one file must not write into each other's.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=PARTIAL)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
