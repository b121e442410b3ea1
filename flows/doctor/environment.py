"""The interpreter, the packages, and the machine."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.doctor.finding import Finding

_MIN_FREE_GB = 5


def check_python() -> Iterator[Finding]:
    """The interpreter, and whether a bare `dvc repro` would find the same one."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info[:2] == (3, 11)
    yield Finding(
        check="python",
        status="ok" if good else "problem",
        found=f"Python {version}",
        next_step="" if good else "make a fresh environment with Python 3.11: `make setup PYTHON=python3.11`",
    )
    on_path = shutil.which("python")
    same = on_path is not None and Path(on_path).resolve() == Path(sys.executable).resolve()
    same = same and Path(on_path or "").parent == Path(sys.executable).parent
    yield Finding(
        check="python on PATH",
        status="ok" if same else "warning",
        found="`python` is this environment's" if same else f"`python` is {on_path or 'not found'}",
        next_step=""
        if same
        else "for a bare `dvc repro`: `. .venv/bin/activate` (edgeloop build does not need it)",
    )


def check_packages(root: Path) -> Iterator[Finding]:
    """Installed versions against requirements.lock."""
    lock = root / "requirements.lock"
    if not lock.is_file():
        yield Finding(
            check="packages",
            status="problem",
            found="no requirements.lock",
            next_step="`git checkout requirements.lock`",
        )
        return
    wrong = []
    pins = [line.split(";")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines()]
    for pin in pins:
        name, equals, wanted = pin.partition("==")
        if not equals or name.startswith(("#", "nvidia", "cuda", "triton")):
            continue
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = "missing"
        if have.split("+")[0] != wanted:
            wrong.append(f"{name} {have}, locked {wanted}")
    yield Finding(
        check="packages",
        status="warning" if wrong else "ok",
        found="; ".join(wrong[:8]) + (" ..." if len(wrong) > 8 else "")
        if wrong
        else "all as in requirements.lock",
        next_step="`make setup` installs the locked versions" if wrong else "",
    )


def check_machine(root: Path) -> Iterator[Finding]:
    """Disk, cores, and whether int8 can be fast here."""
    free_gb = shutil.disk_usage(root).free / 1e9
    enough = free_gb >= _MIN_FREE_GB
    yield Finding(
        check="disk",
        status="ok" if enough else "warning",
        found=f"{free_gb:.0f} GB free",
        next_step="" if enough else f"free at least {_MIN_FREE_GB} GB, or `dvc gc --workspace` old builds",
    )
    from tasks.probe import probe_local

    identity = probe_local()
    yield Finding(
        check="cpu",
        status="ok",
        found=f"{identity['soc']}, {os.cpu_count()} cores, {identity['memory_gib']} GiB",
    )
