"""The gate's page: reasons first, then what passed, compact; the registered version's description."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.judge.check import BY_SEVERITY, Check, Subject, subject_of
from tasks.judge.text import in_cell

_SIGN = {"at most": "≤", "at least": "≥"}
_COLUMNS = {
    "evidence is about this file": "evidence",
    "preprocessing is the proven one": "preprocessing",
    "accuracy floor": "accuracy",
    "accuracy lost against its parent": "lost to parent",
    "parity with torch and ONNX Runtime": "parity",
    "predictions that differ from torch": "differ",
    "model size": "size",
}
"""What is checked to the head of its column, in their order; those of devices follow."""
_ACCURACY, _CLASS = ": accuracy lost against the champion", ": class lost against the champion"


def markdown(verdict: str, checks: Sequence[Check], comparison: Mapping[str, Any]) -> str:
    """The page a reviewer reads: verdict, what refuses, what was waived, what is open, the rest.

    Args:
        verdict: Of the whole build.
        checks: All of them.
        comparison: Key `comparison` of reports/gate.json.
    """
    by_verdict = {name: [c for c in checks if c.verdict == name] for name in BY_SEVERITY}
    head = ", ".join(f"{len(some)} {name}" for name, some in by_verdict.items() if some)
    absent = by_verdict["not measured"]
    variants = {subject_of(c.name).variant for c in checks} - {""}
    noted = [c for c in checks if c.note and c.verdict in ("pass", "not measured")]
    parts = [
        f"**Gate: {verdict}** ({head})",
        *_rows("Refused", by_verdict["fail"]),
        *_lines("Refused, because not measured", _grouped((c for c in absent if c.refuses), variants)),
        *_rows("Waived", by_verdict["waived"]),
        *_lines("Inconclusive", _grouped(by_verdict["inconclusive"], variants)),
        *_lines("Not measured", _grouped((c for c in absent if not c.refuses), variants)),
        *_lines("To be looked at", [f"{in_cell(c.name)}: {in_cell(c.note)}" for c in noted]),
        *_champion(comparison, {check.name: check for check in checks}),
        *_passed(by_verdict["pass"]),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(title: str, checks: Sequence[Check]) -> list[str]:
    """A table of checks of which each has a reason of its own."""
    if not checks:
        return []
    rows = ["| check | measured | threshold | n | why |", "|---|---|---|---|---|"]
    for c in checks:
        threshold = "-" if c.threshold is None else f"{_SIGN[c.bound]} {_shown(c.threshold)} {c.unit}"
        why = "; ".join(text for text in (c.note, c.evidence) if text)
        rows.append(_row(c.name, _shown(c.measured), threshold, _shown(c.n), why))
    return [f"**{title}**\n\n" + "\n".join(rows)]


def _lines(title: str, lines: Sequence[str]) -> list[str]:
    return [f"**{title}**\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []


def _grouped(checks: Iterable[Check], variants: set[str]) -> list[str]:
    """One line a kind of check and reason: the range over the variants, and which these are.

    Args:
        checks: Of which many differ in nothing but the variant.
        variants: All of the build, which a line need not list.
    """
    groups: dict[tuple[object, ...], list[Check]] = {}
    for c in checks:
        about = subject_of(c.name)
        reason = _of_any(c.note or c.evidence, about.variant)
        groups.setdefault((about.kind, about.device, reason, c.threshold, c.unit, c.bound), []).append(c)
    return [_line(group, variants) for group in groups.values()]


def _line(group: Sequence[Check], variants: set[str]) -> str:
    """Checks that share all but variant and measured value, as one line."""
    first = group[0]
    subject, reason = subject_of(first.name), first.note or first.evidence
    if len(group) == 1:
        value = "" if first.measured is None else f" {_pair(first)} {first.unit}"
        return f"{in_cell(first.name)}{value}: {in_cell(reason)}"
    about = {subject_of(c.name).variant for c in group}
    where = f"in all {len(about)} variants" if about == variants else f"in {', '.join(sorted(about))}"
    head = f"{subject.kind}, on {subject.device}" if subject.device else subject.kind
    measured = sorted(c.measured for c in group if isinstance(c.measured, float | int))
    if measured:
        low, high = _shown(measured[0]), _shown(measured[-1])
        span = low if low == high else f"{low} to {high}"
        where = f"{span} {first.unit} {where}, threshold {_SIGN[first.bound]} {_shown(first.threshold)}"
    return f"{in_cell(head)}: {in_cell(where)}; {in_cell(_of_any(reason, subject.variant))}"


def _of_any(reason: str, variant: str) -> str:
    """A reason that names its variant, as one of all that share it."""
    return reason.replace(variant, "VARIANT") if variant else reason


def _champion(comparison: Mapping[str, Any], checks: Mapping[str, Check]) -> list[str]:
    """Every variant against the champion, whatever the verdict: the interval is always printed."""
    if not comparison:
        return []
    rows = [
        "| against the champion | its variant | n | lost, pp | 95 % interval | verdict | class lost |",
        "|---|---|---|---|---|---|---|",
    ]
    own = [name for name, c in comparison.items() if c["same_file"]]
    for name, c in comparison.items():
        if c["same_file"]:
            continue
        low, high = c["interval_pp"]
        its = "the same" if c["against"] == name else c["against"]
        accuracy, lost = checks[name + _ACCURACY], checks[name + _CLASS]
        cells = (f"{c['drop_pp']:.2f} ≤ {_shown(accuracy.threshold)}", f"{low:.2f} to {high:.2f}")
        class_lost = "none" if lost.verdict == "pass" else lost.verdict
        rows.append(_row(name, its, str(c["n"]), *cells, accuracy.verdict, class_lost))
    said = [f"The champion's own files: {', '.join(map(in_cell, own))}."] if own else []
    return [*said, *(["\n".join(rows)] if len(own) < len(comparison) else [])]


def _passed(checks: Sequence[Check]) -> list[str]:
    """One row a variant, one column a kind of check, `measured ≤ threshold` in the cells."""
    cells: dict[str, dict[tuple[int, str], str]] = {}
    others = []
    for c in checks:
        about = subject_of(c.name)
        if not about.variant:
            others.append(f"{in_cell(c.name)} {_pair(c)}")
        elif not c.name.endswith((_ACCURACY, _CLASS)):  # those stand in the table above
            cells.setdefault(about.variant, {})[_column(about, c.unit)] = _cell(c)
    columns = sorted({column for row in cells.values() for column in row})
    rows = [_row("passed", *(head for _, head in columns)), "|---" * (len(columns) + 1) + "|"]
    rows += [_row(name, *(row.get(column, "-") for column in columns)) for name, row in cells.items()]
    return [*(["\n".join(rows)] if cells else []), *([f"Passed, too: {'; '.join(others)}"] if others else [])]


def _column(about: Subject, unit: str) -> tuple[int, str]:
    """Where the column stands, and its head."""
    head = _COLUMNS.get(about.kind, about.kind.removesuffix(", 99 % bound"))
    place = list(_COLUMNS).index(about.kind) if about.kind in _COLUMNS else len(_COLUMNS)
    with_unit = f"{head}, {unit}" if unit in ("MB", "MiB", "ms", "pp") else head
    return place, f"{with_unit} ({about.device})" if about.device else with_unit


def _cell(check: Check) -> str:
    return "ok" if check.threshold == 0 and check.measured == 0 else _pair(check)


def _pair(check: Check) -> str:
    return f"{_shown(check.measured)} {_SIGN[check.bound]} {_shown(check.threshold)}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(in_cell(cell) for cell in cells)} |"


def _shown(value: float | str | None) -> str:
    """Enough digits that a value beside its threshold is not rounded to it."""
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
