"""Why a build was refused: the checks of reports/gate.json that did it, and what each of them found."""

from collections.abc import Mapping
from typing import Any

from tasks.judge.check import refuses, subject_of

_SHARE = "share of the test set"
_DIGITS = 4


def refusing(gate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The checks that refused the build: those that failed, and measurements that are required and missing.

    Those of one kind stand together, whatever variant they are about; the kinds keep the gate's order.

    Args:
        gate: reports/gate.json.

    Raises:
        KeyError, TypeError: it is not what the gate writes.
    """
    found = [c for c in gate["checks"] if refuses(c["verdict"], required=c["required"])]
    kinds = list(dict.fromkeys(subject_of(c["name"]).kind for c in found))
    return sorted(found, key=lambda c: kinds.index(subject_of(c["name"]).kind))


def what_was_found(check: Mapping[str, Any]) -> str:
    """What a check that refused a build measured, against which threshold; or why nothing was measured."""
    if check["verdict"] == "not measured":
        return f"not measured; {check['evidence']}"
    measured, threshold, unit = check["measured"], check["threshold"], check["unit"]
    if unit == _SHARE and isinstance(measured, float | int) and isinstance(threshold, float | int):
        was, limit = _figures(100 * measured, 100 * threshold)
        return f"{was} % of the test set, threshold {limit} %; {check['evidence']}"
    was, limit = _figures(measured, threshold)
    return f"{f'{was} {unit}'.rstrip()}, threshold {limit}; {check['evidence']}"


def _figures(measured: object, threshold: object) -> tuple[str, str]:
    """Both with four significant digits, or as many more as it takes to tell them apart."""
    for digits in range(_DIGITS, 17):
        texts = _short(measured, digits), _short(threshold, digits)
        if texts[0] != texts[1]:
            return texts
    return _short(measured, _DIGITS), _short(threshold, _DIGITS)


def _short(value: object, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
