"""A build against the champion: what it lost in all, and whether it lost a class."""

from collections.abc import Sequence
from dataclasses import replace

from tasks.champion import Champion, ClassChange, Comparison
from tasks.judge.check import Check, judged, not_measured
from tasks.judge.params import GateParams

MIN_N = 2000
"""Below this test size a drop of 0.5 pp lies inside the sampling noise of a paired comparison."""
_MIN_COMMON_SHARE = 0.5
"""With a smaller share of the test images in common, the champion was judged on another test set."""
_ALPHA = 0.01
"""Significance at which a class's fall is no chance. Not divided by the number of classes: with that, a class
of ten images could vanish unseen; that the fall must be large as well keeps false alarms rare."""
_FEWEST = 7
"""Right answers the champion needs in a class for its loss to be significant at all: 2^-7 < 0.01."""
_NAMED = 5  # classes a reason lists


def no_champion() -> Check:
    """The first release has nothing to be held against."""
    return not_measured("champion comparison", "there is no champion: nothing has been released yet")


def nothing_comparable(champion: Champion) -> Check:
    """A champion that no variant can be held against would let any regression through."""
    why = f"{champion} has no variant of a precision that this build has"
    return not_measured("champion comparison", why, required=True)


def classes_check(champion: Champion, labels: Sequence[str]) -> Check:
    """A build that does not know a class at all has lost it, whatever its test images say."""
    gone = [label for label in champion.labels if label not in labels]
    return judged(
        "classes of the champion that are gone",
        len(gone),
        0,
        unit="classes",
        n=len(champion.labels),
        evidence=f"this build does not know {_listed(gone)}" if gone else f"{champion}, the cards' labels",
    )


def champion_checks(
    variant: str, mnn_sha256: str, champion: Champion, comparison: Comparison | str, params: GateParams
) -> list[Check]:
    """Both comparisons of one variant.

    Args:
        variant: Of the build.
        mnn_sha256: Of its model file.
        champion: What it is held against.
        comparison: With the champion's counterpart, or why there is none.
        params: The thresholds.
    """
    names = (f"{variant}: accuracy lost against the champion", f"{variant}: class lost against the champion")
    if isinstance(comparison, str) or comparison.n == 0:
        why = comparison if isinstance(comparison, str) else _no_common(champion, comparison)
        return [not_measured(name, why) for name in names]
    checks = [
        _accuracy(names[0], champion, comparison, params),
        _classes(names[1], champion, comparison, params),
    ]
    changed = comparison.paired.lost + comparison.paired.gained
    if mnn_sha256 == champion.variants[comparison.against].mnn_sha256 and not changed:
        # The released file itself, as after its approval: however few its images, it lost nothing.
        return [replace(c, verdict="pass", evidence=f"{champion}'s own file", note="") for c in checks]
    return checks


def _no_common(champion: Champion, comparison: Comparison) -> str:
    return f"none of the {comparison.test_count} test images is one {champion} was judged on"


def _accuracy(name: str, champion: Champion, comparison: Comparison, params: GateParams) -> Check:
    """An observed drop beyond the limit blocks where n is large enough, or the whole interval lies beyond."""
    n, limit_pp, (low_pp, high_pp) = comparison.n, params.max_champion_drop_pp, comparison.interval_pp
    open_questions = _other_test_set(comparison)
    beyond_noise = low_pp > limit_pp
    if n < MIN_N and not beyond_noise:
        open_questions.insert(0, f"fewer than {MIN_N} images in common, the floors decide")
    elif n < MIN_N:
        open_questions.insert(0, f"the whole interval lies above {limit_pp} pp: no noise of few images")
    unknown = f"{comparison.unknown_count} images of classes the champion does not know are left out"
    check = judged(
        name,
        comparison.drop_pp,
        limit_pp,
        unit="pp",
        n=n,
        evidence=f"{champion}, {comparison.against}, paired: 95 % interval {low_pp:.2f} to {high_pp:.2f} pp",
        required=False,
        note="; ".join((*open_questions, *([unknown] if comparison.unknown_count else []))),
    )
    certain = check.verdict == "fail" and (n >= MIN_N or beyond_noise)
    return check if certain or not open_questions else replace(check, verdict="inconclusive")


def _other_test_set(comparison: Comparison) -> list[str]:
    if comparison.n >= _MIN_COMMON_SHARE * comparison.test_count:
        return []
    return [f"only {comparison.n} of {comparison.test_count} test images are the champion's"]


def _classes(name: str, champion: Champion, comparison: Comparison, params: GateParams) -> Check:
    """No class fell by more than the limit, beyond chance; small test sets tell that, too."""
    fallen = [c for c in comparison.classes if 100 * c.paired.drop > params.max_class_drop_pp]
    fallen.sort(key=lambda c: -c.paired.drop)
    proven = [c for c in fallen if c.paired.p_value_lost() < _ALPHA]
    within_chance = [c for c in fallen if c.paired.p_value_lost() >= _ALPHA]
    testable = [c for c in comparison.classes if c.paired.both + c.paired.lost >= _FEWEST]
    reasons = [f"{champion}, {comparison.against}"]
    reasons += [_shown(c) for c in proven[:_NAMED]]
    reasons += [f"{len(proven) - _NAMED} more classes"] if len(proven) > _NAMED else []
    untestable = len(comparison.classes) - len(testable)
    if untestable:
        reasons.append(f"{untestable} of {len(comparison.classes)} classes have too few images for a test")
    reasons += _other_test_set(comparison)
    check = judged(
        name,
        max((round(100 * c.paired.drop, 4) for c in proven), default=0.0),
        params.max_class_drop_pp,
        unit="pp of one class's recall",
        n=comparison.n,
        evidence="; ".join(reasons),
        required=False,
        note="fell, perhaps by chance: " + ", ".join(map(_shown, within_chance[:_NAMED]))
        if within_chance
        else "",
    )
    if not proven and (not testable or _other_test_set(comparison)):
        return replace(check, verdict="inconclusive")
    return check


def _shown(change: ClassChange) -> str:
    paired = change.paired
    then, now = paired.both + paired.lost, paired.both + paired.gained
    return f"{change.label}: right on {now} of {paired.n}, was {then} (p = {paired.p_value_lost():.2g})"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
