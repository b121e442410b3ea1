"""Waivers: one person's decision to accept one measured value, never a measurement that is missing."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.device.errors import UserError
from tasks.judge.check import Check, subject_of
from tasks.judge.params import Waiver


def apply_waivers(
    checks: Sequence[Check], waivers: Sequence[Waiver], digests: Mapping[str, str]
) -> list[Check]:
    """The checks with what was waived marked so; a waiver that changes nothing is said in its check's note.

    Args:
        checks: All checks of a build.
        waivers: Section `gate.waivers`, one a check at most.
        digests: Variant to the SHA-256 of its model file.

    Raises:
        UserError: a waiver names a check that does not exist, or one that nobody can waive.
    """
    by_name = {check.name: check for check in checks}
    for waiver in waivers:
        if waiver.check not in by_name:
            raise _unknown(waiver, [check.name for check in checks if check.waivable])
        check = by_name[waiver.check]
        if not check.waivable and check.refuses:
            raise UserError(
                f"gate.waivers: {waiver.by} waives {waiver.check!r}, which no one can: {check.evidence}",
                allowed="waivers of measured values, such as an accuracy, a size, a latency",
                next_step="build again so that the evidence is about these files, or mend the model",
            )
        by_name[waiver.check] = _waived(check, waiver, digests)
    return list(by_name.values())


def _waived(check: Check, waiver: Waiver, digests: Mapping[str, str]) -> Check:
    variant = subject_of(check.name).variant
    decision = f"{waiver.by}, up to {waiver.up_to:g} {check.unit}: {waiver.why}"
    if check.verdict != "fail":
        why = {
            "pass": "the check passed",
            "inconclusive": "nothing was refused",
            "not measured": "it cannot stand in for a measurement",
        }[check.verdict]
        note = f"waiver unused, {why} ({decision})"
    elif not isinstance(check.measured, int | float) or _beyond(check, waiver.up_to):
        note = f"waiver does not reach this far ({decision})"
    elif waiver.mnn_sha256 and not digests.get(variant, "").startswith(waiver.mnn_sha256):
        this = digests.get(variant, "no model")[:12]
        note = f"waiver is of model {waiver.mnn_sha256[:12]}, this is {this} ({decision})"
    else:
        return replace(check, verdict="waived", note=_join(f"waived by {decision}", check.note))
    return replace(check, note=_join(note, check.note))


def _beyond(check: Check, up_to: float) -> bool:
    assert isinstance(check.measured, int | float)
    return check.measured > up_to if check.bound == "at most" else check.measured < up_to


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _unknown(waiver: Waiver, names: Sequence[str]) -> UserError:
    near = difflib.get_close_matches(waiver.check, names, n=3, cutoff=0.5)
    return UserError(
        f"gate.waivers: {waiver.by} waives {waiver.check!r}, which is no check of this build",
        allowed=" | ".join(near) if near else "a check's whole name, as reports/gate.md has it",
        next_step="correct the name in params.yaml, or remove the waiver",
    )
