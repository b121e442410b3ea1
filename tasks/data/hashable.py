"""What DVC can hash of someone's images: it crashes on names that are not UTF-8, waits at a pipe."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import UserError

_NAMED = 3
"""Most files an error names."""


def check_hashable(source: Path) -> None:
    """Refuse a folder or archive that DVC could not hash; it does not look into an archive.

    Raises:
        UserError: a name is not UTF-8, a link leads nowhere, or something is neither file nor folder.
    """
    if not _is_utf8(str(source)):
        raise UserError(
            f"the path of the images, {escaped(str(source))}, is not UTF-8",
            allowed="paths in UTF-8: DVC writes them into dvc.lock",
            next_step="rename the folder or file: `mv OLD NEW`, with its bytes as $'\\xNN' where you type it",
        )
    try:
        mode = source.stat().st_mode
    except OSError:  # not there: the caller says where it was looked for
        return
    if stat.S_ISREG(mode):
        return
    if not stat.S_ISDIR(mode):
        raise UserError(
            f"{escaped(str(source))} is a pipe, socket or device",
            allowed="a folder or tar file with the images",
            next_step="name the folder or tar file itself",
        )
    found = [f"{escaped(path)} ({reason})" for path, reason in _unhashable(str(source))]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise UserError(
            f"DVC cannot hash what lies in {source}: {'; '.join(found[:_NAMED])}{more}",
            allowed="files and folders with names in UTF-8; links that lead to a file or folder",
            next_step="rename, mend or remove them (`convmv -f latin1 -t utf8 -r DIR` finds names in another "
            "encoding), or give a tar of the folder: its names are read in any encoding",
        )


def escaped(text: str) -> str:
    r"""A path that can be printed and typed: a byte that is not UTF-8 as \xNN, other controls as Python's."""
    return "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # how Python keeps a byte that is not UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char if char.isprintable() else char.encode("unicode_escape").decode("ascii")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _unhashable(folder: str, below: str = "") -> Iterator[tuple[str, str]]:
    """Paths inside `folder` and what is wrong with each; like DVC, it follows no links to folders."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield below or folder, str(error.strerror)
        return
    for entry in entries:
        path = f"{below}{entry.name}"
        if reason := _reason(entry):
            yield path, reason
        elif entry.is_dir(follow_symlinks=False):
            yield from _unhashable(entry.path, f"{path}/")


def _reason(entry: os.DirEntry[str]) -> str:
    """Why DVC cannot hash one entry of a folder; empty when it can."""
    if not _is_utf8(entry.name):
        return "name not in UTF-8"
    try:
        if entry.is_file() or entry.is_dir():
            return ""
    except OSError as error:  # a link to itself
        return str(error.strerror)
    return "a link that leads nowhere" if entry.is_symlink() else "a pipe, socket or device"
