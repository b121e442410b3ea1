"""`edgeloop doctor`: what is missing or wrong with a set-up, and how to mend each finding."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fleet.device.errors import EdgeloopError, UserError

Status = Literal["ok", "warning", "problem"]

_MIN_FREE_GB = 5
_STAGES = (
    "prepare",
    "validate",
    "train",
    "prune",
    "quantize",
    "export",
    "convert",
    "parity",
    "benchmark",
    "gate",
)
# The converter's own command line installs and feeds this log client; edgeloop never calls it.
_PHONE_HOME_PACKAGE = "aliyun-log-python-sdk"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    check: str
    status: Status
    found: str
    next_step: str = ""
    """How to mend it; empty when there is nothing to mend."""


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


def check_engine_wheel() -> Iterator[Finding]:
    """Every file of the MNN wheel against the hash its RECORD lists, and the log client it would install."""
    distribution = importlib.metadata.distribution("MNN")
    changed = []
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if file.hash is None or path.suffix == ".pyc":
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(str(file))
    yield Finding(
        check="engine wheel",
        status="problem" if changed else "ok",
        found=f"MNN {distribution.version}: "
        + (f"changed files {changed[:5]}" if changed else "all files as the wheel shipped them"),
        next_step=f"`pip install --force-reinstall --no-deps MNN=={distribution.version}`" if changed else "",
    )
    spied = importlib.util.find_spec("aliyun") is not None
    yield Finding(
        check="engine phone-home",
        status="warning" if spied else "ok",
        found=f"{_PHONE_HOME_PACKAGE} is installed: MNN's own command line was run"
        if spied
        else "its log client is not installed",
        next_step=f"`pip uninstall {_PHONE_HOME_PACKAGE}`, and convert with `edgeloop convert`"
        if spied
        else "",
    )


def check_engine_works() -> Iterator[Finding]:
    """A one-convolution model through the converter and the engine, compared with numpy's answer."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from fleet.device.engine import ENGINE_VERSION, Session
    from tasks.mnn.converter import convert

    weight = np.arange(12, dtype=np.float32).reshape(4, 3, 1, 1)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 2, 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 3, 2, 2)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "probe.onnx", Path(folder) / "probe.mnn"
        onnx.save(model, source)
        try:
            convert(source, target)
            with Session(target) as session:
                error = float(
                    np.abs(
                        session.run({"x": x})["y"] - np.einsum("oi,nihw->nohw", weight[..., 0, 0], x)
                    ).max()
                )
        except EdgeloopError as problem:
            yield Finding(
                check="engine",
                status="problem",
                found=str(problem),
                next_step="reinstall MNN with `make setup`; if it stays, report this text",
            )
            return
    good = error < 1e-4
    yield Finding(
        check="engine",
        status="ok" if good else "problem",
        found=f"MNN {ENGINE_VERSION} converts and runs, largest error {error:.1e}",
        next_step=""
        if good
        else "this build of MNN computes wrongly on this CPU: use another machine or version",
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


def check_repository(root: Path) -> Iterator[Finding]:
    """The git checkout and DVC."""
    if shutil.which("git") is None:
        yield Finding(check="git", status="problem", found="git is not installed", next_step="install git")
        return
    state = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    dirty = len(state.stdout.splitlines())
    yield Finding(
        check="git",
        status="problem" if state.returncode else "warning" if dirty else "ok",
        found=state.stderr.strip()
        if state.returncode
        else f"{dirty} uncommitted changes"
        if dirty
        else "clean",
        next_step="work in a git clone"
        if state.returncode
        else "commit before a release: a release needs a clean commit"
        if dirty
        else "",
    )
    dvc_config = root / ".dvc" / "config"
    quiet = dvc_config.is_file() and "analytics = false" in dvc_config.read_text(encoding="utf-8")
    yield Finding(
        check="dvc",
        status="ok" if quiet else "problem",
        found="initialised, analytics off" if quiet else "no .dvc/config with analytics switched off",
        next_step="" if quiet else "`git checkout .dvc/config`",
    )


def check_workspace(workspace: Path) -> Iterator[Finding]:
    """Every section of params.yaml against its stage's model, and the images it points to."""
    import importlib

    from tasks.stage import Params, load_params

    problems = []
    for name in _STAGES:
        model: type[Params] = getattr(importlib.import_module(f"tasks.{name}"), f"{name.capitalize()}Params")
        try:
            load_params(name, model, workspace)
        except UserError as problem:
            problems.append(problem)
    yield Finding(
        check="workspace",
        status="problem" if problems else "ok",
        found="; ".join(p.got for p in problems)
        if problems
        else f"{workspace / 'params.yaml'} fits every stage",
        next_step=problems[0].next_step if problems else "",
    )
    if problems:
        return
    import yaml

    document = yaml.safe_load((workspace / "params.yaml").read_text(encoding="utf-8"))
    source = workspace / document["prepare"]["source"]["path"]
    present = source.exists()
    yield Finding(
        check="source images",
        status="ok" if present else "problem",
        found=f"{source}" if present else f"{source} does not exist",
        next_step="" if present else "put the image set there, or correct prepare.source.path in params.yaml",
    )


def check_tracking(root: Path) -> Iterator[Finding]:
    """Whether MLflow's store can be reached: a file by SQLite's own check, a server by its health page."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith("http"):
        yield _server_finding(uri)
        return
    database = root / ".edgeloop" / "mlflow.db"
    if not database.exists():
        yield Finding(
            check="mlflow", status="ok", found="no runs yet; the first build makes .edgeloop/mlflow.db"
        )
        return
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5) as connection:
            (verdict,) = connection.execute("pragma quick_check").fetchone()
    except sqlite3.Error as problem:
        verdict = str(problem)
    yield Finding(
        check="mlflow",
        status="ok" if verdict == "ok" else "problem",
        found=f".edgeloop/mlflow.db: {verdict}",
        next_step=""
        if verdict == "ok"
        else "move .edgeloop/mlflow.db away: builds go on with a new one; models and reports are not in it",
    )


def _server_finding(uri: str) -> Finding:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5) as answer:  # noqa: S310  # http(s) only, checked by the caller
            return Finding(check="mlflow", status="ok", found=f"{uri} answers {answer.status}")
    except (urllib.error.URLError, OSError) as problem:
        return Finding(
            check="mlflow",
            status="problem",
            found=f"{uri}: {problem}",
            next_step="start that server, or unset MLFLOW_TRACKING_URI to use the embedded store",
        )


def examine(root: Path, workspace: Path) -> list[Finding]:
    """Run every check; one that breaks is itself a finding, the others still run."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": check_python,
        "packages": lambda: check_packages(root),
        "engine wheel": check_engine_wheel,
        "engine": check_engine_works,
        "machine": lambda: check_machine(root),
        "repository": lambda: check_repository(root),
        "workspace": lambda: check_workspace(workspace),
        "mlflow": lambda: check_tracking(root),
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except (ImportError, OSError, LookupError) as problem:
            findings.append(
                Finding(
                    check=name,
                    status="problem",
                    found=f"{type(problem).__name__}: {problem}",
                    next_step="`make setup` installs what is missing",
                )
            )
    return findings


def run(*, root: Path, workspace: Path, as_json: bool) -> int:
    """Print the findings; returns the exit code: 0 when nothing is a problem, else 2."""
    findings = examine(root, workspace)
    bad = any(finding.status == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not bad, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("check", "status", "found", "next step", box=None, pad_edge=False)
        style = {"ok": "green", "warning": "yellow", "problem": "bold red"}
        for f in findings:
            table.add_row(f.check, f"[{style[f.status]}]{f.status}[/]", f.found, f.next_step)
        Console().print(table)
    return 2 if bad else 0
