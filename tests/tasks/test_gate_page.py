"""reports/gate.md: reasons first, short enough for MLflow, and nobody's text breaks it."""

import pytest
from gate_workspace import INT8, VARIANTS, GateWorkspace

from tasks.judge.check import Subject, judged, subject_of
from tasks.judge.table import markdown
from tasks.register import description

_LIMIT = 5000  # characters MLflow keeps of a version's description


def _sections(page):
    return [line.strip("*") for line in page.splitlines() if line.startswith("**") and line.endswith("**")]


def test_refusals_come_first_and_passes_last(tmp_path):
    """What decides is read first, whatever the order of the checks."""
    built = GateWorkspace(path=tmp_path, n=400, wrong_then=0)
    built.lose(INT8, 0, 30)
    built.bench[f"{VARIANTS[0]}/flags"] = "noisy"
    built.parity.pop(f"{VARIANTS[0]}/parity_ok")
    waiver = {"check": f"{INT8}: accuracy floor", "by": "A", "why": "b", "up_to": 0.9}
    built.write().judge(min_top1=0.99, waivers=[waiver])
    page = (tmp_path / "reports" / "gate.md").read_text(encoding="utf-8")
    assert _sections(page) == [
        "Refused",
        "Refused, because not measured",
        "Waived",
        "Inconclusive",
        "Not measured",
    ]
    assert page.index("| against the champion |") < page.index("| passed |")


def test_a_passed_build_has_every_threshold_beside_its_value(tmp_path):
    """One row a variant: no reader needs another page to see what was asked."""
    GateWorkspace(path=tmp_path).write().judge()
    page = (tmp_path / "reports" / "gate.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in page if line.startswith(f"| {INT8} | ok"))
    assert row == (
        f"| {INT8} | ok | ok | 0.95 ≥ 0.9 | 0 ≤ 1 | 1e-06 ≤ 0.0001 | 0 ≤ 25 | 1.6e-05 ≤ 10 "
        "| 1 ≤ 50 | 2 ≤ 100 | 20 ≤ 120 |"
    )
    head = page[page.index(row) - 4]
    assert head == (
        "| passed | evidence | preprocessing | accuracy | lost to parent, pp | parity | differ | size, MB "
        "| P95 latency, ms (local) | P99 latency, ms (local) | peak memory, MiB (local) |"
    )
    assert page[-1] == "Passed, too: engine on local 0 ≤ 0; classes of the champion that are gone 0 ≤ 0"


def test_what_differs_in_nothing_but_the_variant_is_one_line(tmp_path):
    """A noisy run of every variant is two lines, the range in each; of some variants those are named."""
    built = GateWorkspace(path=tmp_path, champion=False)
    for number, name in enumerate(VARIANTS):
        built.bench |= {f"{name}/flags": "noisy", f"{name}/p95_bound_ms": 5.5 + number}
    for name in VARIANTS[1:]:
        built.parity.pop(f"{name}/agreement")
    built.write().judge()
    page = (tmp_path / "reports" / "gate.md").read_text(encoding="utf-8")
    differ, p95, p99, *_ = [line for line in page.splitlines() if line.startswith("- ")]
    assert p95 == (
        "- P95 latency, 99 % bound, on local: 5.5 to 7.5 ms in all 3 variants, threshold ≤ 50; "
        "latency invalid: noisy"
    )
    assert p99.startswith("- P99 latency, 99 % bound, on local: 2 ms in all 3 variants, threshold ≤ 100; lat")
    some = ", ".join(VARIANTS[1:])
    assert differ == f"- predictions that differ from torch: in {some}; parity.json VARIANT/agreement"
    assert "- champion comparison: there is no champion: nothing has been released yet" in page.splitlines()


def test_the_page_fits_into_the_description(tmp_path):
    """Five variants, every one of them refused or open in several ways: still whole in MLflow."""
    names = [f"mbv3s-p{percent}-{kind}-r224" for percent, kind in
             ((0, "fp32"), (30, "fp32"), (30, "fp16"), (30, "w8"), (30, "i8"))]  # fmt: skip
    kinds = ["accuracy floor", "model size", "predictions that differ from torch", "class lost in some way"]
    checks = [
        judged(f"{name}: {kind}", 0.5, 0.9, unit="pp", n=359, evidence=f"parity.json {name}/top1")
        for name in names
        for kind in kinds
    ]
    checks += [
        judged(f"{name}: accuracy", 0.95, 0.9, unit="", n=359, evidence="", bound="at least")
        for name in names
    ]
    assert len(markdown("pass", checks, {})) < _LIMIT
    assert description(markdown("pass", checks, {})) == markdown("pass", checks, {})


def test_a_value_is_not_rounded_to_its_threshold():
    """0.89999 against 0.9 is refused, and a reader sees why."""
    check = judged("v: accuracy floor", 0.89999, 0.9, unit="share", n=10, evidence="e", bound="at least")
    assert "| v: accuracy floor | 0.89999 | ≥ 0.9 share | 10 | e |" in markdown("fail", [check], {})


def test_texts_of_others_stay_in_their_cell():
    """A class or reason with pipes, line ends or HTML breaks neither table nor page."""
    check = judged("v: x", 2.0, 1.0, unit="pp", n=None, evidence="a | b\n| c |\n<script>")
    row = markdown("fail", [check], {}).splitlines()[-1]
    assert row == "| v: x | 2 | ≤ 1 pp | - | a \\| b \\| c \\| &lt;script> |"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](javascript:x)", "\\[a\\](javascript:x)"),
        ("![p](http://x)", "!\\[p\\](http://x)"),
        ("a\\| b", "a\\\\\\| b"),
        ("&#x202E;&lt;", "&amp;#x202E;&amp;lt;"),
        ("99 \u202eliaf", "99 {U+202E}liaf"),
        ("c\u200bat \u2066\x1b[0m", "c{U+200B}at {U+2066}{U+001B}\\[0m"),
        ("cat\u3164 \ufe0f", "cat{U+3164} {U+FE0F}"),
        ("Größe 大 e\u0301", "Größe 大 e\u0301"),
    ],
)
def test_texts_of_others_neither_lead_away_nor_hide(text, shown):
    """No link, picture, entity, reversed or invisible letter of a class or waiver reaches a reviewer."""
    check = judged("v: x", 2.0, 1.0, unit="pp", n=None, evidence=text)
    assert markdown("fail", [check], {}).splitlines()[-1] == f"| v: x | 2 | ≤ 1 pp | - | {shown} |"


@pytest.mark.parametrize(
    ("name", "variant", "device", "kind"),
    [
        ("mbv3s-int8: accuracy floor", "mbv3s-int8", "", "accuracy floor"),
        ("mbv3s-int8 on host-x86: p99 latency", "mbv3s-int8", "host-x86", "p99 latency"),
        ("a: accuracy lost against mbv3s-p30-fp32-r48", "a", "", "accuracy lost against its parent"),
        ("a: accuracy lost against the champion", "a", "", "accuracy lost against the champion"),
        ("source is committed", "", "", "source is committed"),
    ],
)
def test_the_name_of_a_check_tells_its_subject(name, variant, device, kind):
    """Variants with different parents share one kind of check; the champion is nobody's parent."""
    assert subject_of(name) == Subject(variant=variant, device=device, kind=kind)
