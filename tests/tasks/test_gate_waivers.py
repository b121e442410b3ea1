"""Waivers: a named person accepts a measured value, up to a value; everything else is refused or unused."""

import json

import pytest
from gate_workspace import FP32, INT8, PRUNED, GateWorkspace, by_verdict, digest

from fleet.device.errors import UserError
from tasks.gate import GateParams
from tasks.stage import load_params

PARENT = f"{INT8}: accuracy lost against {PRUNED}"
WAIVER = {"check": PARENT, "by": "A. Lee", "why": "the old camera | goes in spring", "up_to": 1.2}


@pytest.fixture
def built(tmp_path):
    """int8 loses 27 of 2,500 images against its parent: 1.08 pp, threshold 1."""
    workspace = GateWorkspace(path=tmp_path, champion=False)
    workspace.lose(INT8, 0, 27)
    return workspace.write()


def test_a_waived_value_lets_the_build_pass_and_shows_by_whom_and_why(built):
    """Verdict `waived` in report and page, with author, reason and limit; part of the evidence hash."""
    refused = built.judge()
    report = built.judge(waivers=[WAIVER])
    assert (refused["verdict"], report["verdict"]) == ("fail", "pass")
    check = by_verdict(report, "waived")[PARENT]
    assert check["measured"] == 1.08
    assert check["note"] == "waived by A. Lee, up to 1.2 pp: the old camera | goes in spring"
    page = (built.path / "reports" / "gate.md").read_text(encoding="utf-8")
    assert "waived by A. Lee, up to 1.2 pp: the old camera \\| goes in spring" in page
    other = built.judge(waivers=[WAIVER | {"by": "B. Lee"}])
    assert other["evidence_sha256"] != report["evidence_sha256"]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"up_to": 1.07}, "waiver does not reach this far (A. Lee, up to 1.07 pp"),
        ({"mnn_sha256": digest(b"older")}, f"waiver is of model {digest(b'older')[:12]}, this is "),
    ],
)
def test_beyond_its_bounds_a_waiver_changes_nothing(built, change, note):
    """A worse value, or another model than it was given for: the check fails and says why."""
    report = built.judge(waivers=[WAIVER | change])
    assert report["verdict"] == "fail"
    assert by_verdict(report, "fail")[PARENT]["note"].startswith(note)


def test_a_waiver_may_be_bound_to_one_file(built):
    """Twelve digits of the model's SHA-256 are enough to name it."""
    report = built.judge(waivers=[WAIVER | {"mnn_sha256": digest(INT8.encode())[:12]}])
    assert list(by_verdict(report, "waived")) == [PARENT]


def test_a_floor_is_waived_downwards(built):
    """For a value that has to be at least something `up_to` is the lowest accepted."""
    name = f"{INT8}: accuracy floor"
    wide = WAIVER | {"up_to": 5}
    for up_to, verdict in ((0.93, "waived"), (0.94, "fail")):
        report = built.judge(min_top1=0.945, waivers=[wide, WAIVER | {"check": name, "up_to": up_to}])
        assert name in by_verdict(report, verdict)


@pytest.mark.parametrize(
    ("check", "verdict", "why"),
    [
        (f"{FP32}: accuracy floor", "pass", "the check passed"),
        (f"{FP32} on local: P95 latency, 99 % bound", "inconclusive", "nothing was refused"),
        (f"{FP32} on local: peak memory", "not measured", "it cannot stand in for a measurement"),
        ("stability run", "not measured", "it cannot stand in for a measurement"),
    ],
)
def test_a_waiver_of_what_is_not_refused_is_said_to_be_unused(built, check, verdict, why):
    """A passed check stays passed, a missing measurement stays missing."""
    built.bench |= {f"{FP32}/flags": "noisy", f"{FP32}/peak_memory_mb": None}
    report = built.write().judge(waivers=[WAIVER | {"check": check}])
    assert by_verdict(report, verdict)[check]["note"].startswith(f"waiver unused, {why} (A. Lee, up to 1.2")
    assert not by_verdict(report, "waived")


def test_missing_evidence_cannot_be_waived(built):
    """A required measurement that is not there refuses, waiver or not."""
    del built.bench[f"{INT8}/p99_bound_ms"]
    name = f"{INT8} on local: P99 latency, 99 % bound"
    report = built.write().judge(waivers=[WAIVER, WAIVER | {"check": name}])
    assert report["verdict"] == "fail"
    assert "stand in for a measurement" in by_verdict(report, "not measured")[name]["note"]


def test_an_unknown_check_lists_the_near_ones(built):
    """A misspelt name must not look like a waiver in force."""
    with pytest.raises(UserError) as told:
        built.judge(waivers=[WAIVER | {"check": f"{INT8}: accuracy lost against {FP32}"}])
    assert "which is no check of this build" in told.value.got
    assert PARENT in told.value.allowed
    with pytest.raises(UserError, match=r"as reports/gate\.md has it"):
        built.judge(waivers=[WAIVER | {"check": "?"}])


@pytest.mark.parametrize("fault", ["swapped", "parity"])
def test_nobody_waives_what_is_no_measured_value(built, fault):
    """Evidence about another file, or an engine that computes something else, is not for accepting."""
    name = f"{INT8}: evidence is about this file"
    if fault == "swapped":
        built.models[INT8] = b"another"
    else:
        built.parity[f"{INT8}/parity_ok"] = 0
        name = f"{INT8}: parity with torch and ONNX Runtime"
    with pytest.raises(UserError, match="which no one can"):
        built.write().judge(waivers=[WAIVER | {"check": name, "up_to": 1e9}])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{check: x, why: y, up_to: 1}", r"gate\.waivers\.0\.by: Field required"),
        ("{check: x, by: ' ', why: y, up_to: 1}", r"gate\.waivers\.0\.by: String should have at least 1"),
        ("{check: x, by: A, up_to: 1}", r"gate\.waivers\.0\.why: Field required"),
        ("{check: x, by: A, why: '', up_to: 1}", r"gate\.waivers\.0\.why: String should have at least 1"),
        ("{check: x, by: A, why: y}", r"gate\.waivers\.0\.up_to: Field required"),
        ("{check: x, by: A, why: y, up_to: .inf}", r"up_to: Input should be a finite number"),
        ("{check: x, by: A, why: y, up_to: .nan}", r"up_to: Input should be a finite number"),
        ("{check: x, by: A, why: y, up_to: 1, until: z}", r"until: Extra inputs are not permitted"),
        ("{check: x, by: A, why: y, up_to: 1, mnn_sha256: abc}", r"mnn_sha256: String should match"),
        ("{check: x, by: A, why: y, up_to: 1}, {check: x, by: B, why: z, up_to: 2}", "more than one waiver"),
    ],
)
def test_a_waiver_without_author_reason_or_limit_is_refused(tmp_path, lines, message):
    """The section is validated before a stage runs; the key that is wrong is named."""
    (tmp_path / "params.yaml").write_text(f"gate:\n  waivers: [{lines}]\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_params("gate", GateParams, tmp_path)


@pytest.mark.parametrize("field", ["by", "why"])
@pytest.mark.parametrize("text", ["\u200b", "\u2060 \u200d", "\u3164", "\u2800", "\ufe0f\u202e"])
def test_an_author_or_reason_that_nobody_can_see_is_none(tmp_path, field, text):
    """Letters without width and fillers name no person."""
    waiver = json.dumps(WAIVER | {field: text})  # JSON is YAML
    (tmp_path / "params.yaml").write_text(f"gate: {{waivers: [{waiver}]}}\n", encoding="utf-8")
    with pytest.raises(UserError, match=f"gate.waivers.0.{field}: .*nothing to read"):
        load_params("gate", GateParams, tmp_path)
