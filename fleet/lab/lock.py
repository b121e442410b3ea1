"""A lock on a device for every user of this host: flock(2), which ends with its holder, by kill -9 too."""

import contextlib
import fcntl
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import UserError

_SHARED = Path("/tmp")  # noqa: S108 - not TMPDIR, which differs between users; nothing is written there
_OTHER_IS_CREATING_S = 1.0


def lock_path(device: str) -> Path:
    """Where the lock of a device lies."""
    folder = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
    return folder / f"edgeloop-device-{device}.lock"


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock at `path`; waits for its holder and says so on stderr.

    The file is only read, so that of another user serves too; it stays when the lock is dropped, or two could
    each hold a lock of that name.

    Raises:
        UserError: something that is no lock lies there, or a file that this user may not read.
    """
    while True:
        descriptor = _open(path)
        try:
            _wait(descriptor, what)
            if _is(path, descriptor):  # else it was removed while we waited, as cleaners of /tmp do
                yield
                return
        finally:
            os.close(descriptor)


def _open(path: Path) -> int:
    """Open the lock file, made when there is none; a link or a pipe in its place is not followed."""
    deadline = time.monotonic() + _OTHER_IS_CREATING_S
    while True:
        try:
            return _existing(path)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another was faster
                return _create(path)
        except PermissionError as error:  # between another's creation and its fchmod, or for good
            if time.monotonic() > deadline:
                raise _unusable(path, "may not be read by this user") from error
            time.sleep(0.02)
        except OSError as error:
            raise _unusable(path, error.strerror or str(error)) from error


def _existing(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unusable(path, "is no plain file")
    return descriptor


def _create(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    os.fchmod(descriptor, 0o644)  # whatever the umask: others have to read it
    return descriptor


def _wait(descriptor: int, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{what}: another measurement runs there; waiting for its end", file=sys.stderr, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _unusable(path: Path, why: str) -> UserError:
    return UserError(
        f"the device's lock {path}: {why}",
        allowed="a plain file that every user can read",
        next_step=f"its owner or root removes it: rm {path}",
    )
