"""All findings, as a table or as JSON."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from flows.doctor.engine import check_engine_wheel, check_engine_works
from flows.doctor.environment import check_machine, check_packages, check_python
from flows.doctor.finding import Finding
from flows.doctor.services import check_tracking
from flows.doctor.table import print_findings
from flows.doctor.workspace import check_other_workspaces, check_repository, check_workspace
from tasks.workspace import Workspace


def examine(workspace: Workspace) -> list[Finding]:
    """Run every check; one that breaks is itself a finding, the others still run."""
    root = workspace.repository
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": check_python,
        "packages": lambda: check_packages(root),
        "engine wheel": check_engine_wheel,
        "engine": check_engine_works,
        "machine": lambda: check_machine(root),
        "repository": lambda: check_repository(root),
        "workspace": lambda: check_workspace(workspace),
        "other workspaces": lambda: check_other_workspaces(workspace),
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


def run(workspace: Workspace, *, as_json: bool) -> int:
    """Print the findings; returns the exit code: 0 when nothing is a problem, else 2."""
    findings = examine(workspace)
    bad = any(finding.status == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not bad, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print_findings(findings)
    return 2 if bad else 0
