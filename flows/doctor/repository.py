"""The git checkout, the workspace's folders, and DVC's cache and remotes."""

import configparser
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from flows.doctor.finding import Finding, exists
from tasks.workspace import Workspace

_GIT_LIMIT_S = 30.0
_FULL_GB = 1.0


def check_git(root: Path) -> Iterator[Finding]:
    """Whether this is a checkout, and clean."""
    if shutil.which("git") is None:
        yield Finding(check="git", status="problem", found="git is not installed", next_step="install git")
        return
    state = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_GIT_LIMIT_S,
    )
    dirty = len(state.stdout.splitlines())
    if state.returncode:
        said = " ".join(state.stderr.split())
        yield Finding(check="git", status="problem", found=said, next_step=_git_step(said, root))
        return
    yield Finding(
        check="git",
        status="warning" if dirty else "ok",
        found=f"{dirty} uncommitted changes" if dirty else "clean",
        next_step="commit: a release registered now is tagged `-dirty`" if dirty else "",
    )


def _git_step(said: str, root: Path) -> str:
    if "dubious ownership" in said:
        return f"`git config --global --add safe.directory {root}`, if you trust who owns it"
    return "work in a git clone"


def check_writable(workspace: Workspace) -> Iterator[Finding]:
    """Whether a build could write where it has to."""
    names = ("", "models", "data", "reports", ".edgeloop", ".dvc", ".dvc/tmp")
    folders = dict.fromkeys(
        [workspace.path / name for name in names] + [workspace.repository / name for name in names]
    )
    closed = [str(folder) for folder in folders if exists(folder) and not _can_write(folder)]
    yield Finding(
        check="writable",
        status="problem" if closed else "ok",
        found=f"read-only: {', '.join(closed)}" if closed else f"{workspace.path}",
        next_step="give yourself write access, or clone to a folder of your own" if closed else "",
    )


def _can_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and not os.statvfs(folder).f_flag & os.ST_RDONLY


def check_dvc(root: Path) -> Iterator[Finding]:
    """DVC's settings, its cache, and its remotes as far as files tell; a network remote is not called."""
    config = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        read = config.read([root / ".dvc" / "config", root / ".dvc" / "config.local"], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        yield Finding(
            check="dvc",
            status="problem",
            found=f"{root / '.dvc'}: {' '.join(str(error).split())}",
            next_step="`git checkout .dvc/config`, and mend or remove .dvc/config.local",
        )
        return
    quiet = bool(read) and config.get("core", "analytics", fallback="").strip() == "false"
    yield Finding(
        check="dvc",
        status="ok" if quiet else "problem",
        found="initialised, analytics off" if quiet else "no .dvc/config with analytics switched off",
        next_step="" if quiet else "`git checkout .dvc/config`",
    )
    yield _cache(root, config)
    for section in config.sections():
        if section.strip("'").startswith("remote "):
            yield _remote(root, section.strip("'").split('"')[1], config.get(section, "url", fallback=""))


def _cache(root: Path, config: configparser.ConfigParser) -> Finding:
    folder = root / ".dvc" / Path(config.get("cache", "dir", fallback="cache")).expanduser()
    if not exists(folder):
        return Finding(check="dvc cache", status="ok", found=f"none yet; the first build makes {folder}")
    free_gb = shutil.disk_usage(folder).free / 1e9
    trouble = "cannot be written" if not _can_write(folder) else ""
    trouble = trouble or (f"only {free_gb:.2f} GB free" if free_gb < _FULL_GB else "")
    return Finding(
        check="dvc cache",
        status="problem" if trouble else "ok",
        found=f"{folder}: {trouble or f'writable, {free_gb:.1f} GB free'}",
        next_step="give yourself write access, or free space: `dvc gc --workspace`" if trouble else "",
    )


def _remote(root: Path, name: str, url: str) -> Finding:
    check = f"dvc remote {name}"
    scheme, mark, _ = url.partition("://")
    if mark and scheme != "file":
        return Finding(check=check, status="ok", found=f"{scheme}://...: not called; `dvc status -c` does")
    folder = root / ".dvc" / Path(url.removeprefix("file://")).expanduser()
    place = os.path.normpath(folder)
    if exists(folder):
        good = _can_write(folder)
        return Finding(
            check=check,
            status="ok" if good else "warning",
            found=f"{place}: {'writable' if good else 'cannot be written'}",
            next_step="" if good else "give yourself write access before `dvc push`",
        )
    return Finding(check=check, status="ok", found=f"{place}: nothing there yet; `dvc push` makes it")
