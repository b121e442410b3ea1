"""All findings, as a table or as JSON.

What imports the engine or the stages runs in children beside the rest: it takes seconds, and in a broken
environment it may crash. This process needs Python alone.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from flows.doctor.engine import check_engine_wheel, check_phone_home
from flows.doctor.environment import check_machine, check_packages, check_pip, check_python
from flows.doctor.finding import Finding, guarded, in_child
from flows.doctor.locks import check_locks, check_undelivered
from flows.doctor.repository import check_dvc, check_git, check_writable
from flows.doctor.table import print_findings
from tasks.workspace import Workspace

_ENGINE_LIMIT_S = 120.0
_STAGES_LIMIT_S = 180.0


def examine(workspace: Workspace) -> list[Finding]:
    """Run every check; one that breaks is itself a finding, the others still run."""
    root = workspace.repository
    place = (str(root.absolute()), workspace.name)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": check_python,
        "packages": lambda: check_packages(root),
        "pip": check_pip,
        "machine": lambda: check_machine(root),
        "engine wheel": check_engine_wheel,
        "engine phone-home": check_phone_home,
        "git": lambda: check_git(root),
        "writable": lambda: check_writable(workspace),
        "dvc": lambda: check_dvc(root),
        "locks": lambda: check_locks(workspace),
        "undelivered": lambda: check_undelivered(root),
        "services": lambda: _check_services(root),
    }
    with ThreadPoolExecutor(2) as pool:
        engine = pool.submit(in_child, "engine", "flows.doctor.engine", timeout_s=_ENGINE_LIMIT_S)
        stages = pool.submit(
            in_child, "workspace", "flows.doctor.workspace", *place, timeout_s=_STAGES_LIMIT_S
        )
        here = {name: guarded(name, check) for name, check in checks.items()}
        here["engine phone-home"] += guarded("engine", engine.result)
        here["locks"] = guarded("workspace", stages.result) + here["locks"]
    return [finding for found in here.values() for finding in found]


def _check_services(root: Path) -> Iterator[Finding]:
    from flows.doctor.services import check_mlflow, check_prefect  # they need packages of others

    yield from check_mlflow(root)
    yield from check_prefect(root)


def run(workspace: Workspace, *, as_json: bool) -> int:
    """Print the findings; returns the exit code: 0 when nothing is a problem, else 2."""
    if sys.stderr.isatty() and not as_json:
        print("looking; importing the stages and trying the engine take some seconds", file=sys.stderr)
    findings = examine(workspace)
    bad = any(finding.status == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not bad, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print_findings(findings)
    return 2 if bad else 0
