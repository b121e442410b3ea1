"""Why a build was refused: the checks of reports/gate.json that did it, and what each of them found."""

from collections.abc import Mapping
from typing import Any

from tasks.judge.check import refuses


def refusing(gate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The checks that refused the build: those that failed, and measurements that are required and missing.

    Args:
        gate: reports/gate.json.

    Raises:
        KeyError, TypeError: it is not what the gate writes.
    """
    return [c for c in gate["checks"] if refuses(c["verdict"], required=c["required"])]


def what_was_found(check: Mapping[str, Any]) -> str:
    """What a check that refused a build measured, against which threshold; or why nothing was measured."""
    if check["verdict"] == "not measured":
        return f"not measured; {check['evidence']}"
    measured = f"{check['measured']} {check['unit']}".rstrip()
    return f"{measured}, threshold {check['threshold']}; {check['evidence']}"
