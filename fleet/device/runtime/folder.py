"""The folder of a runtime: errors of its disk as refusals, and one process at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import UserError
from fleet.device.runtime.refusal import UpdateRefusedError


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say what the system says of `path` as a refusal: no room, not writable, too large.

    Raises:
        UpdateRefusedError: reason `disk`.
    """
    try:
        yield
    except OSError as error:
        raise UpdateRefusedError("disk", f"{path}: {error.strerror or error}") from error


class FolderLock:
    """One process at a time works in a folder: flock(2), which ends with its holder, by kill -9 too."""

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            UserError: another holds it, or the folder cannot be written.
        """
        path = folder / "lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(
                f"{folder}: {error.strerror or error}",
                allowed="a folder that this user can write",
                next_step="give the runtime a folder of its own",
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise UserError(
                f"{folder} is in use by another runtime",
                allowed="one runtime, in one process, for a folder",
                next_step="close the other one, or give this one a folder of its own",
            ) from error

    def release(self) -> None:
        """Let others in; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
