"""Read a small file only if it is what this user wrote: no link, no device, nobody else's."""

import os
import stat
from pathlib import Path


def read_own(path: Path, *, most_bytes: int, others_may: int) -> bytes:
    """The bytes of a regular file of this user.

    Args:
        path: Itself, not what a link leads to.
        most_bytes: A longer one is none of ours.
        others_may: Bits of the mode that group and others may have, such as 0o044.

    Raises:
        OSError: it is missing, a link, or cannot be read.
        ValueError: it is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        require_own(status, others_may=others_may)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
            raise ValueError(f"no regular file of at most {most_bytes} bytes")
        content = os.read(descriptor, most_bytes + 1)
    finally:
        os.close(descriptor)
    return content


def require_own(status: os.stat_result, *, others_may: int) -> None:
    """Refuse what another user owns or others may touch.

    Raises:
        ValueError: with owner and mode.
    """
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 & ~others_may:
        raise ValueError(f"user {status.st_uid}'s, mode {status.st_mode & 0o777:o}")
