"""The interpreter, the packages, what a bare `pip` would change, and the machine."""

import importlib.metadata
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from flows.doctor.finding import REINSTALL, Finding, exists
from flows.doctor.wheel import recorded_files

_MIN_FREE_GB = 5
_MIN_MEMORY_GIB = 2
_NAMED = 8
_NO_PIN = ("#", "nvidia", "cuda", "triton")
_PIP_FILES = ("~/.pip/pip.conf", "~/.config/pip/pip.conf", "/etc/pip.conf", "/etc/xdg/pip/pip.conf")


def check_python() -> Iterator[Finding]:
    """The interpreter, and whether a bare `dvc repro` would find the same one."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info[:2] == (3, 11)
    yield Finding(
        check="python",
        status="ok" if good else "problem",
        found=f"Python {version}, {sys.executable}",
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
    """Installed versions against requirements.lock, and whether all their files are there."""
    lock = root / "requirements.lock"
    if not lock.is_file():
        yield Finding(
            check="packages",
            status="problem",
            found=f"no {lock}",
            next_step="`git checkout requirements.lock`",
        )
        return
    wrong, broken = [], []
    pins = [line.split(";")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines()]
    for name, equals, wanted in (pin.partition("==") for pin in pins):
        if not equals or name.startswith(_NO_PIN):
            continue
        have = _version(name)
        if have.partition("+")[0] != wanted:
            wrong.append(f"{name} {have}, locked {wanted}")
        elif missing := _missing_files(name):
            broken.append(
                f"{name} lacks {missing[0]}" + (f" and {len(missing) - 1} more" * (len(missing) > 1))
            )
    yield Finding(
        check="packages",
        status="warning" if wrong else "ok",
        found=_some(wrong) if wrong else "all as in requirements.lock",
        next_step=f"`{sys.executable} -m pip install -r {lock}`" if wrong else "",
    )
    left = sorted(p.name for p in Path(sysconfig.get_paths()["purelib"]).glob("~*"))
    broken += [f"{name} is left of an interrupted pip" for name in left]
    yield Finding(
        check="package files",
        status="problem" if broken else "ok",
        found=_some(broken) if broken else "none is half installed",
        next_step=REINSTALL if broken else "",
    )


def _version(name: str) -> str:
    try:
        package = importlib.metadata.distribution(name)
        # A half-installed package may have its folder of metadata without METADATA.
        return (package.read_text("METADATA") and package.metadata["Version"]) or "half installed"
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _missing_files(name: str) -> list[str]:
    files = recorded_files(importlib.metadata.distribution(name))
    return ["its RECORD"] if files is None else [file.name for file in files if not exists(file.path)]


def check_pip() -> Iterator[Finding]:
    """Which environment a bare `pip` changes, and what steers it, by name: the values may hold passwords."""
    on_path = shutil.which("pip")
    own = on_path is not None and Path(on_path).parent == Path(sys.executable).parent
    steering = sorted(name for name in os.environ if name.startswith("PIP_"))
    files = [Path(name).expanduser() for name in _PIP_FILES] + [Path(sys.prefix) / "pip.conf"]
    steering += [str(path) for path in files if exists(path)]
    also = f"; steered by {', '.join(steering)}" if steering else ""
    whose = "this environment's" if own else "of another environment"
    found = f"{on_path}, {whose}" if on_path else "none"
    yield Finding(check="pip on PATH", status="ok", found=f"{found}; edgeloop never calls it{also}")


def check_machine(root: Path) -> Iterator[Finding]:
    """Disk, memory, cores."""
    free_gb = shutil.disk_usage(root).free / 1e9
    enough = free_gb >= _MIN_FREE_GB
    yield Finding(
        check="disk",
        status="ok" if enough else "warning",
        found=f"{free_gb:.1f} GB free at {root}",
        next_step="" if enough else f"free at least {_MIN_FREE_GB} GB, or `dvc gc --workspace` old builds",
    )
    total, free = _memory_gib()
    if total is not None and free is not None:
        enough = free >= _MIN_MEMORY_GIB
        yield Finding(
            check="memory",
            status="ok" if enough else "warning",
            found=f"{free:.1f} of {total:.1f} GiB free",
            next_step=""
            if enough
            else f"end other programs: training and conversion want {_MIN_MEMORY_GIB} GiB or more",
        )
    yield Finding(
        check="cpu",
        status="ok",
        found=f"{_cpu()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    )


def _memory_gib() -> tuple[float | None, float | None]:
    """Total and available memory as Linux tells it; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None, None
    kib = {key: float(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines) if rest}
    total, free = kib.get("MemTotal"), kib.get("MemAvailable")
    return (total / 2**20 if total else None), (free / 2**20 if free is not None else None)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    return next(names, platform.machine())


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:_NAMED]) + (f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else "")
