"""The gate: each kind of bad build is refused, and for the right reason."""

import hashlib

import pytest

from fleet.device.errors import UserError
from tasks.gate import GateParams, evaluate, gate, markdown, overall, require_judged
from tasks.stage import write_json

FP32, PRUNED, INT8 = "mbv3s-p0-fp32-r32", "mbv3s-p30-fp32-r32", "mbv3s-p30-i8-r32"


def build(**changes):
    """Reports of a good build of three variants, with some keys changed (None removes one)."""
    convert, parity, bench = {}, {}, {}
    for name, top1, size in ((FP32, 0.97, 6_000_000), (PRUNED, 0.965, 4_000_000), (INT8, 0.96, 1_000_000)):
        convert[f"{name}/size_bytes"] = size
        parity |= {
            f"{name}/top1": top1,
            f"{name}/n": 2000,
            f"{name}/agreement": 1.0,
            f"{name}/parity_ok": True,
            f"{name}/max_rel_error": 1e-6,
            f"{name}/tolerance_rel": 1e-4,
        }
        bench |= {
            f"{name}/p95_bound_ms": 1.0,
            f"{name}/p95_bound_rank": 487,
            f"{name}/p99_bound_ms": 2.0,
            f"{name}/p99_bound_rank": 500,
            f"{name}/n": 500,
            f"{name}/peak_memory_mb": 20.0,
            f"{name}/flags": "",
        }
    for key, value in changes.items():
        report = next(r for r in (convert, parity, bench) if key in r)
        report.pop(key)
        if value is not None:
            report[key] = value
    return convert, parity, {"local": bench}


def failed(checks):
    """Names of the failed checks."""
    return [check.name for check in checks if check.verdict == "fail"]


def test_a_good_build_passes_and_says_what_it_could_not_measure():
    """All floors kept: pass; a champion, an old engine and a long run are named as not measured."""
    checks = evaluate(*build(), GateParams())
    assert overall(checks) == "pass"
    assert failed(checks) == []
    assert {c.name for c in checks if c.verdict == "not measured"} == {
        "champion comparison",
        "oldest engine in the field",
        "stability run",
    }


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (f"{FP32}/top1", 0.899, f"{FP32}: accuracy floor"),
        (f"{PRUNED}/top1", 0.9599, f"{PRUNED}: accuracy lost against {FP32}"),
        (f"{INT8}/top1", 0.9549, f"{INT8}: accuracy lost against {PRUNED}"),
        (f"{INT8}/parity_ok", False, f"{INT8}: parity with torch and ONNX Runtime"),
        (f"{INT8}/agreement", 0.9895, f"{INT8}: predictions that differ from torch"),
        (f"{FP32}/size_bytes", 10_000_001, f"{FP32}: model size"),
        (f"{FP32}/p95_bound_ms", 50.1, f"{FP32} on local: P95 latency, 99 % bound"),
        (f"{FP32}/p99_bound_ms", 100.1, f"{FP32} on local: P99 latency, 99 % bound"),
        (f"{FP32}/peak_memory_mb", 120.5, f"{FP32} on local: peak memory"),
    ],
)
def test_one_fault_is_refused_for_its_own_reason(key, value, reason):
    """Just past each threshold: the build is refused, and by this check alone."""
    checks = evaluate(*build(**{key: value}), GateParams())
    assert overall(checks) == "fail"
    assert failed(checks) == [reason]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{FP32}/top1", 0.96),  # the pruned model may then even be better
        (f"{PRUNED}/top1", 0.9601),
        (f"{INT8}/agreement", 0.99),
        (f"{FP32}/size_bytes", 10_000_000),
        (f"{FP32}/p95_bound_ms", 50.0),
    ],
)
def test_on_the_threshold_passes(key, value):
    """Thresholds are allowed values themselves."""
    assert overall(evaluate(*build(**{key: value}), GateParams())) == "pass"


@pytest.mark.parametrize(
    "key", [f"{INT8}/top1", f"{INT8}/parity_ok", f"{INT8}/agreement", f"{INT8}/p95_bound_ms"]
)
def test_missing_evidence_is_not_measured_and_refuses(key):
    """A report without the value: not measured, and what is not measured is no pass."""
    checks = evaluate(*build(**{key: None}), GateParams())
    assert overall(checks) == "fail"
    assert failed(checks) == []


def test_a_device_without_a_benchmark_refuses():
    """A report that says nothing about the variants: latency not measured, the build refused."""
    convert, parity, _ = build()
    checks = evaluate(convert, parity, {"local": {}}, GateParams())
    assert overall(checks) == "fail"
    assert failed(checks) == []


def write_reports(workspace, *devices):
    """A workspace with a good build's reports, benchmarked on `devices`."""
    convert, parity, benchmarks = build()
    write_json(workspace / "reports" / "convert.json", convert)
    write_json(workspace / "reports" / "parity.json", parity)
    for name in (FP32, PRUNED, INT8):
        model = workspace / "models" / "mnn" / name / "model.mnn"
        model.parent.mkdir(parents=True, exist_ok=True)
        model.write_bytes(name.encode())
    hashes = {
        f"{name}/mnn_sha256": hashlib.sha256(name.encode()).hexdigest() for name in (FP32, PRUNED, INT8)
    }
    for device in devices:
        write_json(workspace / "reports" / "benchmark" / f"{device}.json", benchmarks["local"] | hashes)


def test_a_report_of_a_device_that_is_gone_is_refused(tmp_path):
    """A stale measurement must not count as this build's: the file is named."""
    write_reports(tmp_path, "local", "old-phone")
    with pytest.raises(UserError, match="old-phone"):
        gate(tmp_path, GateParams())


def test_a_missing_device_report_is_refused(tmp_path):
    """No benchmark at all is no pass."""
    write_reports(tmp_path)
    with pytest.raises(UserError, match=r"local\.json"):
        gate(tmp_path, GateParams())


def test_a_benchmark_of_other_bytes_is_refused(tmp_path):
    """A latency measured before the model changed is no latency of this model."""
    write_reports(tmp_path, "local")
    (tmp_path / "models" / "mnn" / INT8 / "model.mnn").write_bytes(b"another")
    with pytest.raises(UserError, match=rf"local\.json measured {INT8}"):
        gate(tmp_path, GateParams())


def test_files_changed_after_the_verdict_are_found(tmp_path):
    """Bit rot in a model, whatever its time stamp says, is not what was judged."""
    write_reports(tmp_path, "local")
    report = gate(tmp_path, GateParams())
    require_judged(tmp_path, report)
    (tmp_path / "models" / "mnn" / INT8 / "model.mnn").write_bytes(b"rotten")
    with pytest.raises(UserError, match=rf"{INT8}/model\.mnn is not what the gate judged"):
        require_judged(tmp_path, report)


def test_evidence_covers_models_cards_reports_and_thresholds(tmp_path):
    """Any byte of what was judged, or a threshold, gives another evidence hash."""
    write_reports(tmp_path, "local")
    card = tmp_path / "models" / "mnn" / FP32 / "card.json"
    hashes = [gate(tmp_path, GateParams())["evidence_sha256"]]
    card.write_text("[]", encoding="utf-8")
    hashes.append(gate(tmp_path, GateParams())["evidence_sha256"])
    card.write_text("{}", encoding="utf-8")
    hashes.append(gate(tmp_path, GateParams())["evidence_sha256"])
    hashes.append(gate(tmp_path, GateParams(max_size_mb=9.0))["evidence_sha256"])
    assert len(set(hashes)) == 4
    assert gate(tmp_path, GateParams(max_size_mb=9.0))["evidence_sha256"] == hashes[-1]


def test_latency_of_a_noisy_host_is_inconclusive_and_does_not_refuse():
    """The same slow bound on a flagged run: neither pass nor fail, and the flag is the evidence."""
    checks = evaluate(*build(**{f"{FP32}/flags": "noisy", f"{FP32}/p95_bound_ms": 500.0}), GateParams())
    latency = [c for c in checks if c.name.startswith(f"{FP32} on local") and "latency" in c.name]
    assert {c.verdict for c in latency} == {"inconclusive"}
    assert all("noisy" in c.evidence for c in latency)
    assert overall(checks) == "pass"


def test_allowed_disagreements_are_at_least_one():
    """50 images at 99 %: half an image rounds up to one, so one flip passes and two fail."""
    small = {f"{INT8}/n": 50}
    assert overall(evaluate(*build(**small, **{f"{INT8}/agreement": 0.98}), GateParams())) == "pass"
    assert overall(evaluate(*build(**small, **{f"{INT8}/agreement": 0.96}), GateParams())) == "fail"


def test_the_table_lists_refusals_first():
    """A reviewer reads the verdict, then the failed rows, then the rest."""
    checks = evaluate(*build(**{f"{INT8}/top1": 0.5}), GateParams())
    lines = markdown(overall(checks), checks).splitlines()
    assert lines[0].startswith("**Gate: fail** (2 fail")
    assert "**fail**" in lines[4]
    assert "**fail**" in lines[5]
    assert "**pass**" in lines[-1]
