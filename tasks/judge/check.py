"""One threshold and what was measured against it; what all of them together decide."""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fleet.device.errors import UserError

Verdict = Literal["pass", "fail", "inconclusive", "not measured", "waived"]
BY_SEVERITY: tuple[Verdict, ...] = ("fail", "inconclusive", "not measured", "waived", "pass")

Bound = Literal["at most", "at least"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One threshold and what was measured against it."""

    name: str
    """`WHAT IT IS ABOUT: what is checked`, unique in a build."""
    measured: float | str | None
    threshold: float | str | None
    unit: str
    n: int | None
    verdict: Verdict
    evidence: str
    """The report and key the measured value was read from, or why there is none."""
    required: bool = True
    """Whether a build without this measurement is refused."""
    bound: Bound = "at most"
    """How `measured` has to lie to `threshold`."""
    waivable: bool = False
    """Whether a person may accept a measured value beyond the threshold."""
    note: str = ""
    """What a reviewer has to know whatever the verdict: a warning, or what became of a waiver."""

    @property
    def refuses(self) -> bool:
        """Whether this check alone refuses a build: it failed, or needed a measurement and has none."""
        return refuses(self.verdict, required=self.required)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the name of a check tells; of a check of the whole build only its kind."""

    variant: str
    device: str
    kind: str
    """The same for every variant: the parent of one is called its parent."""


def subject_of(name: str) -> Subject:
    """Read `VARIANT: KIND` or `VARIANT on DEVICE: KIND`."""
    about, of_variant, kind = name.partition(": ")
    if not of_variant:
        return Subject(variant="", device="", kind=name)
    variant, _, device = about.partition(" on ")
    return Subject(variant=variant, device=device, kind=_PARENT.sub(" against its parent", kind))


_PARENT = re.compile(r" against \S+$")  # not `against the champion`, which are two words


def refuses(verdict: str, *, required: bool) -> bool:
    """Whether a check with this verdict refuses a build."""
    return verdict == "fail" or (required and verdict == "not measured")


def overall(checks: Iterable[Check]) -> Literal["pass", "fail"]:
    """One failed check refuses the build; so does a required one that was not measured."""
    return "fail" if any(check.refuses for check in checks) else "pass"


def judged(
    name: str,
    measured: float | None,
    threshold: float | None,
    *,
    unit: str,
    n: int | None,
    evidence: str,
    bound: Bound = "at most",
    required: bool = True,
    note: str = "",
) -> Check:
    """A number against its threshold, which a person may waive; without number or threshold not measured."""
    verdict: Verdict = "not measured"
    if measured is not None and threshold is not None:
        kept = measured <= threshold if bound == "at most" else measured >= threshold
        verdict = "pass" if kept else "fail"
    return Check(
        name=name,
        measured=measured,
        threshold=threshold,
        unit=unit,
        n=n,
        verdict=verdict,
        evidence=evidence,
        required=required,
        bound=bound,
        waivable=True,
        note=note,
    )


def not_measured(name: str, why: str, *, required: bool = False) -> Check:
    """A check that nothing was measured for: absent evidence is said, never passed."""
    return Check(
        name=name,
        measured=None,
        threshold=None,
        unit="",
        n=None,
        verdict="not measured",
        evidence=why,
        required=required,
    )


_MOST = sys.float_info.max
_SHARE, _COUNT, _POSITIVE = (0, 1), (1, 10**7), (0, _MOST)
_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("top1", "agreement", "parity_ok"), _SHARE),
    **dict.fromkeys(("n", "elementwise_n", "p95_bound_rank", "p99_bound_rank"), _COUNT),
    **dict.fromkeys(("max_rel_error", "tolerance_rel", "size_bytes", "int8_ops_count"), _POSITIVE),
    **dict.fromkeys(("p95_bound_ms", "p99_bound_ms", "peak_memory_mb"), _POSITIVE),
}
"""Key to the least and the largest value that can have been measured."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What one report says about one variant."""

    file: str
    """The report, as seen from reports/."""
    variant: str
    values: Mapping[str, Any]
    """The report's flat keys, `VARIANT/key`."""

    def number(self, key: str) -> float | None:
        """A finite number that can have been measured, None where the report has none.

        Raises:
            UserError: something else stands there.
        """
        value = self.values.get(f"{self.variant}/{key}")
        if value is None:
            return None
        low, high = _RANGES.get(key, (-_MOST, _MOST))
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            limits = "" if low == -_MOST else f" from {low}" + ("" if high == _MOST else f" to {high}")
            raise self.impossible(key, f"a finite number{limits}")
        return value

    def count(self, key: str) -> int | None:
        """A number of things."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise self.impossible(key, "a whole number")
        return None if value is None else int(value)

    def text(self, key: str) -> str | None:
        """A text, None where the report has none."""
        value = self.values.get(f"{self.variant}/{key}")
        return None if value is None else str(value)

    def impossible(self, key: str, allowed: str) -> UserError:
        """The error that a value is none that a stage can have written."""
        value = repr(self.values.get(f"{self.variant}/{key}"))
        return UserError(
            f"reports/{self.file}: {self.variant}/{key} is {value[:80]}",
            allowed=allowed,
            next_step="`edgeloop build` writes the report again when it is deleted",
        )
