"""Files that are there whole or not at all, whenever the process or the power ends."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial"
_OWN = 0o600


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = _OWN) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, its bytes and its name on the disk by then.

    Two processes that write one path do not write into each other's: each has a name of its own meanwhile.

    Args:
        path: In a folder that is there.
        mode: Permissions of the file.

    Raises:
        OSError: the disk; what was at `path` is as it was, and nothing is left beside it.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=_PARTIAL)
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode != _OWN:
                os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)
    except BaseException:  # whatever ends the block, also Ctrl-C
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_durably(path: Path, content: bytes, *, mode: int = _OWN) -> None:
    """Replace `path` by `content`; see `replacing`."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def make_once(path: Path, content: bytes) -> bool:
    """Make a file that only its owner may read; False where there is one already, which stays.

    Raises:
        OSError: the disk; then there is none.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=_PARTIAL) as made:
        made.write(content)
        made.flush()
        os.fsync(made.fileno())
        try:
            os.link(made.name, path)
        except FileExistsError:
            return False
    sync(path.parent)
    return True


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left beside their files."""
    for left in folder.glob(f"*{_PARTIAL}"):
        left.unlink(missing_ok=True)
