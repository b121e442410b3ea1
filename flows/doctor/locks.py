"""Locks, and who holds them; and what an ended build has left to tell MLflow."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

from fleet.lab.lock import lock_path
from flows.doctor.finding import Finding
from flows.dvc_rwlock import FILE, holders
from flows.servers import UI_LOCK
from tasks.workspace import Workspace

_LOCKS = Path("/proc/locks")


def check_locks(workspace: Workspace) -> Iterator[Finding]:
    """Locks that somebody holds now, and entries that a killed DVC has left.

    The kernel frees a lock with its process: a file alone, as most of these always lie there, blocks nobody.
    """
    root = workspace.repository
    folders = dict.fromkeys((root / ".edgeloop", workspace.path / ".edgeloop"))
    # `edgeloop ui` holds its own for as long as somebody looks, and nobody waits for it.
    locks = (path for folder in folders for path in sorted(folder.glob("*.lock")))
    files = [path for path in locks if path.name != UI_LOCK]
    files += [root / ".dvc" / "tmp" / "lock", lock_path("local")]
    held = [(path, owner) for path in files if (owner := _holder(path)) is not None]
    for path, owner in held:
        yield Finding(
            check=f"lock {path.name}",
            status="warning",
            found=f"{path} is held by {owner}",
            next_step="wait for its end, or stop it; others wait meanwhile",
        )
    yield from _dvc_entries(root / FILE)
    if not held:
        yield Finding(check="locks", status="ok", found=f"none of {len(files)} is held")


def _holder(path: Path) -> str | None:
    """Who holds a lock file now; None when nobody does, or it is not there."""
    try:
        inode = path.stat().st_ino
        lines = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return _tried(path) if not _LOCKS.exists() else None
    # Only looked up: taking the lock to see whether it is free would be in a build's way.
    rows = [line.split() for line in lines if "->" not in line]  # an arrow: who waits for one
    owners = dict.fromkeys(int(row[4]) for row in rows if row[5].rpartition(":")[2] == str(inode))
    return ", ".join(_named(pid) for pid in owners) or None


def _tried(path: Path) -> str | None:
    """The same where the system lists no locks: taken for a moment, shared with whom it can be."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another process"
    except OSError:
        return None
    return None


def _named(pid: int) -> str:
    if pid <= 0:
        return "a process outside this container"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({' '.join(words)[:100].strip()})"


def _dvc_entries(path: Path) -> Iterator[Finding]:
    """DVC's list of who reads and writes which path: by process id, so a killed one stays in it."""
    try:
        found = holders(path)
    except (OSError, ValueError) as error:
        yield Finding(
            check="dvc rwlock",
            status="problem",
            found=f"{path} cannot be read: {error}",
            next_step=f"when no build runs: `rm {path}`",
        )
        return
    for holder in found:
        alive = Path(f"/proc/{holder.pid}").exists()
        yield Finding(
            check="dvc rwlock",
            status="warning" if alive else "ok",
            found=f"{holder.command} (process {holder.pid}) "
            + ("works on this repository" if alive else "was killed; DVC drops its entry by itself"),
            next_step="wait for its end, or stop it" if alive else "",
        )


def check_undelivered(root: Path) -> Iterator[Finding]:
    """Messages of stages that no writer has brought to MLflow yet."""
    spool = root / ".edgeloop" / "spool"
    waiting = [
        (folder.name, len(list(folder.glob("*.jsonl"))))
        for folder in sorted(spool.glob("*/"))
        if _holder(folder / "writer.lock") is None and any(folder.glob("*.jsonl"))
    ]
    if not waiting:
        yield Finding(check="undelivered", status="ok", found="MLflow has all that stages told")
        return
    said = ", ".join(f"{count} stages of {build}" for build, count in waiting[:5])
    yield Finding(
        check="undelivered",
        status="warning",
        found=f"{len(waiting)} builds wait for MLflow: {said}; nothing is lost",
        next_step=f"the next `edgeloop build` delivers them; why not yet says writer.log in {spool}",
    )
