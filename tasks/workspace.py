"""Workspaces: folders with params.yaml and dvc.yaml; and whether what runs is what their hashes speak of."""

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet.device.errors import UserError

CODE = Path(__file__).resolve().parents[1]
"""The folder this code was imported from."""
DEFAULT = "digits"
"""Name of the workspace at the repository's root."""

_PINS = tuple(f"infra/pins/{name}.txt" for name in ("engine", "images", "onnx", "training"))


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """One model line: its parameters, its outs, its reports."""

    name: str
    path: Path
    repository: Path


def python_path(code: Path) -> str:
    """PYTHONPATH for a child that is to run the code in `code`, before what the caller's holds."""
    return os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))


def find_repository(start: Path) -> Path | None:
    """The nearest folder at or above `start` that DVC was initialised in."""
    return next((folder for folder in (start, *start.parents) if (folder / ".dvc").is_dir()), None)


def repository() -> Path:
    """The edgeloop repository around the working directory, else the one this code lies in."""
    found = find_repository(Path.cwd())
    return found if found and (found / "tasks" / "stage.py").is_file() else CODE


def workspace_name(path: Path) -> str:
    """The name of the workspace in folder `path`."""
    root = find_repository(path)
    return DEFAULT if path == root else path.name


def workspaces(root: Path) -> dict[str, Workspace]:
    """Every workspace of a repository by name: the root's first, then presets, then one's own."""
    folders = [
        p.parent for kind in ("presets", "workspaces") for p in sorted(root.glob(f"{kind}/*/params.yaml"))
    ]
    found = {DEFAULT: Workspace(name=DEFAULT, path=root, repository=root)}
    return found | {f.name: Workspace(name=f.name, path=f, repository=root) for f in folders}


def find_workspace(name: str | None) -> Workspace:
    """The workspace called `name`; without a name the one around the working directory, else the root's.

    Raises:
        UserError: there is none of that name.
    """
    root = repository()
    known = workspaces(root)
    if name is None:
        here = Path.cwd()
        inside = [w for w in known.values() if here.is_relative_to(w.path)]
        return max(inside, key=lambda w: len(w.path.parts), default=known[DEFAULT])
    if name not in known:
        raise UserError(
            f"workspace {name!r}",
            allowed=", ".join(known),
            next_step="take one of these, or make one from your images with `edgeloop init NAME DIR`",
        )
    return known[name]


def check_environment() -> None:
    """Refuse to compute with code or packages that the workspace's hashes do not speak of.

    Raises:
        UserError: under DVC, when Python found another copy of this code than the one whose files DVC hashed;
            or when an installed package is not the pinned one.
    """
    hashed = os.environ.get("DVC_ROOT")
    if hashed and (Path(hashed) / "tasks" / "stage.py").is_file() and Path(hashed).resolve() != CODE:
        raise UserError(
            f"DVC hashed the code in {hashed}, but Python imports it from {CODE}",
            allowed="one copy of the code for both",
            next_step=f"use `edgeloop build`, or `PYTHONPATH={hashed} dvc repro`",
        )
    for file in _PINS:
        for pin in (CODE / file).read_text(encoding="utf-8").split():
            package, _, version = pin.partition("==")
            installed = _installed(package)
            if installed != version:
                raise UserError(
                    f"{package} {installed or 'is not'} installed",
                    allowed=f"{pin}, as {file} pins it",
                    next_step=f"`make setup`; to upgrade edit {file}: what it computes is built again",
                )


NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_ROOM_BYTES = 1 << 20
"""With less free, an error that says nothing of the disk (torch's, SQLite's) still comes from it."""


def disk_full(error: BaseException, folder: Path) -> UserError | None:
    """The error to show when `error` came from a disk without room; None when it did not."""
    chain = causes(error)
    told = next(filter(_is_no_room, chain), None)
    free = shutil.disk_usage(folder).free
    if told is None and free >= _NO_ROOM_BYTES:
        return None
    told = told or chain[-1]
    where = getattr(told, "filename", None) or folder.absolute()
    return UserError(
        f"no room to write {where}: {getattr(told, 'strerror', None) or told}; {free / 1e9:.1f} GB free",
        allowed="a disk, quota and file size limit (`ulimit -f`) with room for data and models",
        next_step="free some space (`dvc gc --workspace` removes old builds), then build again: it goes on",
    )


def causes(error: BaseException) -> list[BaseException]:
    """An error and what it came from, outermost first."""
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None and cause not in found:
        found.append(cause)
    return found


def _is_no_room(error: BaseException) -> bool:
    if type(error).__module__ == "sqlite3":
        return str(error) in ("disk I/O error", "database or disk is full")
    return isinstance(error, OSError) and error.errno in NO_ROOM


@contextlib.contextmanager
def only_process(stage: str) -> Iterator[None]:
    """Let one process at a time compute a stage in this workspace: an orphan of a killed `dvc` may still."""
    folder = Path(".edgeloop")
    folder.mkdir(exist_ok=True)
    with (folder / f"{stage}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"{stage}: another process still computes this stage here; waiting for its end",
                file=sys.stderr,
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None
