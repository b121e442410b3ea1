"""The files of an image folder or a tar archive, listed without following what leads out of it.

A tar archive is read in memory and never extracted: a member named `../x` has nowhere to go.
"""

import os
import re
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from fleet.device.errors import UserError
from tasks.data.decode import MAX_FILE_BYTES
from tasks.data.listing import Refusal, RefusalKind, printable

_BLOCK = 512  # a tar header and the end marker are counted in these
_WINDOWS_PATH = re.compile(r"^[A-Za-z]:|\\")


@dataclass
class Tree:
    """Files by their POSIX path inside the source, in the order in which they read fastest."""

    origin: Path
    files: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    """Raw path (undecodable bytes as surrogates) to a reader that raises OSError."""
    folders: set[str] = field(default_factory=set)
    refusals: list[Refusal] = field(default_factory=list)

    def refuse(self, name: str, kind: RefusalKind, reason: str) -> None:
        """Record a file that is not offered."""
        self.refusals.append(Refusal(printable(name), kind, reason))


def read_folder(root: Path) -> Tree:
    """List a folder's files by name.

    Links are followed to files inside the folder only; links to folders, pipes and devices are refused.

    Raises:
        UserError: it is no folder, or cannot be listed.
    """
    if not root.is_dir():
        raise _missing(root, "a folder of images")
    tree = Tree(root)
    inside = root.resolve()
    for folder, subfolders, names in os.walk(root, onerror=partial(_unlistable, tree)):
        here = Path(folder)
        linked = {name for name in subfolders if (here / name).is_symlink()}
        subfolders[:] = sorted(set(subfolders) - linked)
        tree.folders.update((here / name).relative_to(root).as_posix() for name in subfolders)
        for name in sorted(linked):
            reason = "a link to a folder: link its files, or name the folder itself as source"
            tree.refuse((here / name).relative_to(root).as_posix(), "link", reason)
        for name in sorted(names):
            _offer_file(tree, here / name, inside)
    return tree


def _unlistable(tree: Tree, error: OSError) -> None:
    name = Path(error.filename).relative_to(tree.origin).as_posix()
    tree.refuse(name, "unreadable", f"folder: {error.strerror}")


def _offer_file(tree: Tree, path: Path, inside: Path) -> None:
    name = path.relative_to(tree.origin).as_posix()
    try:
        target = path.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        tree.refuse(name, "link" if path.is_symlink() else "unreadable", str(error))
        return
    if not target.is_relative_to(inside):
        tree.refuse(name, "link", f"leads out of the folder, to {printable(str(target))}")
    elif not stat.S_ISREG(status.st_mode):
        tree.refuse(name, "special_file", "a pipe, socket or device, no regular file")
    elif status.st_size > MAX_FILE_BYTES:
        tree.refuse(name, "too_large", f"{status.st_size} bytes; at most {MAX_FILE_BYTES}")
    else:
        tree.files[name] = path.read_bytes


def read_tar(path: Path) -> Tree:
    """List a tar archive's files in archive order; compressed ones (gz, bz2, xz) too.

    Raises:
        UserError: it is missing, no tar archive, or ends before its end marker.
    """
    if not path.is_file():
        raise _missing(path, "a tar archive")
    tree = Tree(path)
    try:
        archive = tarfile.open(path)  # noqa: SIM115 - the readers need it open as long as the tree lives
        for member in archive:
            _offer_member(tree, archive, member)
        complete = _has_end_marker(archive)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise _damaged(path, str(error)) from error
    if not complete:
        raise _damaged(path, f"no end marker after {len(tree.files)} files")
    return tree


def _offer_member(tree: Tree, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    parts = PurePosixPath(member.name).parts
    name = "/".join(parts)
    if not parts:  # the entry `./` for the folder itself
        return
    if member.name.startswith("/") or ".." in parts or _WINDOWS_PATH.search(member.name):
        tree.refuse(member.name, "unsafe_name", "an absolute path, a path upwards, or a Windows path")
    elif member.isdir():
        tree.folders.add(name)
    elif member.issym() or member.islnk():
        tree.refuse(
            name, "link", f"a link to {printable(member.linkname)}: archives are read without following links"
        )
    elif not member.isfile():
        tree.refuse(name, "special_file", "a pipe or device, no regular file")
    elif member.size > MAX_FILE_BYTES:
        tree.refuse(name, "too_large", f"{member.size} bytes; at most {MAX_FILE_BYTES}")
    else:
        if tree.files.pop(name, None):  # as when extracting: the last of one name stays
            tree.refuse(name, "superseded", "the archive holds a later file of this name")
        tree.files[name] = partial(_read_member, archive, member)
        tree.folders.update(str(parent) for parent in PurePosixPath(name).parents if parent.name)


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    assert stream is not None  # only regular files have this reader
    with stream:
        try:
            return stream.read()
        except (tarfile.TarError, EOFError) as error:
            raise OSError(f"archive damaged at {member.name}: {error}") from error


def _has_end_marker(archive: tarfile.TarFile) -> bool:
    """Whether the listing stopped at a block of zeros: tarfile takes any damaged header for the end."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    block = archive.fileobj.read(_BLOCK)
    return len(block) == _BLOCK and not any(block)


def _missing(path: Path, what: str) -> UserError:
    return UserError(
        f"prepare.source.path: {path} is not there"
        if not path.exists()
        else f"prepare.source.path: {path} is not {what}",
        allowed=f"{what}, as seen from the workspace folder",
        next_step="put the images there, or correct prepare.source in params.yaml",
    )


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"{path}: {what}",
        allowed="a whole tar archive, plain or compressed with gzip, bzip2 or xz",
        next_step="copy or download the archive again",
    )
