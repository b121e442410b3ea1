"""The first screen: the verdict, and what the reviewer has to decide, worst first."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tasks.judge.check import BY_SEVERITY, Check, Verdict, refuses, subject_of
from tasks.report.evidence import Evidence
from tasks.report.text import figures

_SHOWN_LINES = 2
_SHOWN_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Checks of one verdict with one cause."""

    verdict: Verdict
    title: str
    """What was checked."""
    why: str
    """Why it was not passed, where the gate says more than the numbers do."""
    lines: tuple[str, ...]
    """Which variant, what was measured, and the limit; the worst come first and the rest are counted."""
    rest_count: int
    required: bool


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands on top of the report."""

    state: str
    """refused, undecided (nothing to judge by) or passed; names the colour."""
    title: str
    lead: str
    """What there is to decide, in one sentence."""
    reasons: tuple[Reason, ...]
    rest_count: int
    """Reasons that stand only in the table of checks."""
    notes: tuple[str, ...]
    """What passed and has to be known nevertheless."""
    counts: tuple[tuple[Verdict, int], ...]


def head(evidence: Evidence) -> Head:
    """The verdict and its reasons."""
    gate = evidence.gate
    if gate is None:
        lead = "reports/gate.json is not there: nothing was judged, nothing can be approved. Build again."
        return Head(
            state="undecided", title="Not judged", lead=lead, reasons=(), rest_count=0, notes=(), counts=()
        )
    reasons = _reasons(gate.checks)
    counts = {verdict: sum(check.verdict == verdict for check in gate.checks) for verdict in BY_SEVERITY}
    state, title = (
        ("refused", "Refused by the gate") if gate.verdict == "fail" else ("passed", "Passed the gate")
    )
    if evidence.stale:
        state, title = "refused", "The verdict is stale"
    return Head(
        state=state,
        title=title,
        lead=_lead(evidence, counts),
        reasons=tuple(reasons[:_SHOWN_REASONS]),
        rest_count=len(reasons) - len(reasons[:_SHOWN_REASONS]),
        notes=tuple(f"{c.name}: {c.note}" for c in gate.checks if c.verdict == "pass" and c.note),
        counts=tuple((verdict, count) for verdict, count in counts.items() if count),
    )


def _lead(evidence: Evidence, counts: dict[Verdict, int]) -> str:
    assert evidence.gate is not None
    if evidence.stale:
        return f"{evidence.stale}. Build again; do not decide from this report."
    if evidence.gate.verdict == "fail":
        return "Nothing to approve: it cannot be registered. Mend what is named here, then build again."
    questions = [
        text.format(count, "check" if count == 1 else "checks", "was" if count == 1 else "were")
        for text, count in (
            ("accept {} inconclusive {}", counts["inconclusive"]),
            ("ship without {} {} that {} not measured", counts["not measured"]),
            ("stand by {} waived {}", counts["waived"]),
        )
        if count
    ]
    if not questions:
        return "Every check passed. Yours to decide: are the changed images and classes acceptable?"
    return f"Yours to decide: {', '.join(questions)}."


def rank(check: Check) -> tuple[bool, int]:
    """Order of the checks, what refuses the build first: so does a required measurement that is not there."""
    allowed = not refuses(check.verdict, required=check.required)
    return allowed, BY_SEVERITY.index(check.verdict)


def _reasons(checks: Sequence[Check]) -> list[Reason]:
    """All that did not pass, grouped; what refuses the build comes first."""
    everything = {subject_of(check.name).variant for check in checks} - {""}
    found = [check for check in checks if check.verdict != "pass"]
    ordered = sorted(found, key=lambda check: (rank(check), _group(check)))
    grouped = groupby(ordered, key=lambda check: (rank(check), _group(check)))
    return [_reason(list(group), everything) for _, group in grouped]


def _group(check: Check) -> str:
    """Failed checks of one kind belong together, other verdicts by their cause."""
    return check.note or check.evidence if check.verdict in ("inconclusive", "waived") else _kind(check)


def _kind(check: Check) -> str:
    """What is checked, in few words."""
    return subject_of(check.name).kind.removesuffix(", 99 % bound")


def _reason(checks: Sequence[Check], everything: set[str]) -> Reason:
    first = checks[0]
    kinds = list(dict.fromkeys(_kind(check) for check in checks))
    lines = _lines(checks, everything, alone=len(kinds) == 1)
    return Reason(
        verdict=first.verdict,
        title=_capital(", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")),
        why=_why(checks),
        lines=tuple(lines[:_SHOWN_LINES]),
        rest_count=max(0, len(lines) - _SHOWN_LINES),
        required=first.required,
    )


def _lines(checks: Sequence[Check], everything: set[str], *, alone: bool) -> list[str]:
    """One line a check, the worst first; what was not measured has no values and shares one line."""
    if checks[0].verdict != "not measured":
        return [_line(check, alone=alone) for check in sorted(checks, key=_excess, reverse=True)]
    variants = list(dict.fromkeys(v for check in checks if (v := subject_of(check.name).variant)))
    if len(variants) > 1 and set(variants) == everything:
        return [f"all {len(variants)} variants"]
    more = f" and {len(variants) - _SHOWN_LINES} more" if len(variants) > _SHOWN_LINES else ""
    return [", ".join(variants[:_SHOWN_LINES]) + more] if variants else []


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _why(checks: Sequence[Check]) -> str:
    """What the gate says beside the numbers, where it says the same of all: note, evidence or both."""
    first = checks[0]
    if first.verdict == "waived":
        return first.note or first.evidence
    said = ({check.note for check in checks}, {check.evidence for check in checks})
    return "; ".join(text for texts in said if len(texts) == 1 for text in texts if text)


def _excess(check: Check) -> float:
    """How far beyond its limit, as a share of it: negative within, for floors and ceilings alike."""
    if not isinstance(check.measured, float | int) or not isinstance(check.threshold, float | int):
        return 0.0
    beyond = check.measured - check.threshold
    return (-beyond if check.bound == "at least" else beyond) / (abs(check.threshold) or 1.0)


def _line(check: Check, *, alone: bool) -> str:
    subject, colon, _ = check.name.partition(": ")
    where = subject if alone or not colon else f"{subject}, {_kind(check)}"
    if check.measured is None:
        return where
    limit = "" if check.threshold is None else f", {check.bound} {figures(check.threshold)}"
    unit = f" {check.unit}" if check.unit else ""
    return f"{where}: {figures(check.measured)}{unit}{limit}"
