"""Stage gate: every threshold beside its measured value, and one verdict for the whole build.

The stage itself succeeds whether or not the gate refuses: a refusal is a result, and its report must survive.
`edgeloop build` exits 1 on it, and a refused build is not registered.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fleet.device.errors import UserError
from tasks.stage import REPORTS, Params, read_json, stage, write_text
from tasks.variants import Variant

Verdict = Literal["pass", "fail", "inconclusive", "not measured", "waived"]
_BY_SEVERITY: tuple[Verdict, ...] = ("fail", "inconclusive", "not measured", "waived", "pass")

_MIN_N_CHAMPION = 2000
"""Below this test size a drop of 0.5 pp lies inside the sampling noise of a paired comparison."""


class GateParams(Params):
    """Section `gate` of params.yaml."""

    min_top1: float = Field(default=0.9, ge=0, le=1)
    """Accuracy floor of every variant, as a share of the test set, measured in the engine."""
    max_prune_drop_pp: float = Field(default=1.0, ge=0)
    """Most percentage points the pruned fp32 model may lose against the trained one."""
    max_precision_drop_pp: float = Field(default=1.0, ge=0)
    """Most percentage points an fp16, w8 or i8 model may lose against its fp32 parent."""
    max_size_mb: float = Field(default=10.0, gt=0)
    """Largest model file in 10^6 bytes."""
    max_p95_ms: float = Field(default=50.0, gt=0)
    max_p99_ms: float = Field(default=100.0, gt=0)
    """Latency floors; compared with the upper confidence bound, not with the observed percentile."""
    max_peak_memory_mb: float = Field(default=120.0, gt=0)
    min_agreement: float = Field(default=0.99, ge=0, le=1)
    """Share of test images on which the engine must predict what the torch reference predicts."""
    devices: tuple[str, ...] = ("local",)
    """Devices whose benchmark is judged: those of the workspace's `devices`."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One threshold and what was measured against it."""

    name: str
    measured: float | str | None
    threshold: float | str | None
    unit: str
    n: int | None
    verdict: Verdict
    evidence: str
    """The report and key the measured value was read from, or why there is none."""
    required: bool = True
    """Whether a build without this measurement is refused."""


def _at_most(
    name: str,
    measured: float | None,
    limit: float,
    *,
    unit: str,
    n: int | None,
    evidence: str,
    required: bool = True,
) -> Check:
    return Check(
        name=name,
        measured=measured,
        threshold=limit,
        unit=unit,
        n=n,
        verdict="not measured" if measured is None else "pass" if measured <= limit else "fail",
        evidence=evidence,
        required=required,
    )


def _accuracy_checks(name: str, parity: Mapping[str, Any], params: GateParams) -> list[Check]:
    top1, n = parity.get(f"{name}/top1"), parity.get(f"{name}/n")
    floor = Check(
        name=f"{name}: accuracy floor",
        measured=top1,
        threshold=params.min_top1,
        unit="share of the test set",
        n=n,
        verdict="not measured" if top1 is None else "pass" if top1 >= params.min_top1 else "fail",
        evidence=f"parity.json {name}/top1",
    )
    checks = [floor]
    parent, limit_pp = _parent(Variant.parse(name), params)
    if parent is not None:
        parent_top1 = parity.get(f"{parent}/top1")
        drop_pp = None if top1 is None or parent_top1 is None else round(100 * (parent_top1 - top1), 4)
        checks.append(
            _at_most(
                f"{name}: accuracy lost against {parent}",
                drop_pp,
                limit_pp,
                unit="pp",
                n=n,
                evidence=f"parity.json {parent}/top1 - {name}/top1",
            )
        )
    return checks


def _parent(variant: Variant, params: GateParams) -> tuple[str | None, float]:
    """The variant this one was made from, and how much it may lose against it in pp."""
    if variant.precision != "fp32":
        return replace(variant, precision="fp32").name, params.max_precision_drop_pp
    if variant.pruned_percent:
        return replace(variant, pruned_percent=0).name, params.max_prune_drop_pp
    return None, 0.0


def _parity_checks(name: str, parity: Mapping[str, Any], params: GateParams) -> list[Check]:
    n, agreement = parity.get(f"{name}/n"), parity.get(f"{name}/agreement")
    allowed = None if n is None else max(1, math.ceil((1 - params.min_agreement) * n - 1e-9))
    differing = None if n is None or agreement is None else round((1 - agreement) * n)
    ok = parity.get(f"{name}/parity_ok")
    return [
        Check(
            name=f"{name}: parity with torch and ONNX Runtime",
            measured=parity.get(f"{name}/max_rel_error"),
            threshold=parity.get(f"{name}/tolerance_rel"),
            unit="of the output range",
            n=parity.get(f"{name}/elementwise_n"),
            verdict="not measured" if ok is None else "pass" if ok else "fail",
            evidence=f"parity.json {name}/parity_ok; first diverging layer: "
            f"{parity.get(f'{name}/first_diverging_layer') or 'none'}",
        ),
        Check(
            name=f"{name}: predictions that differ from torch",
            measured=differing,
            threshold=allowed,
            unit="images",
            n=n,
            verdict="not measured"
            if differing is None or allowed is None
            else "pass"
            if differing <= allowed
            else "fail",
            evidence=f"parity.json {name}/agreement",
        ),
    ]


def _device_checks(name: str, device: str, bench: Mapping[str, Any], params: GateParams) -> list[Check]:
    flags = str(bench.get(f"{name}/flags", ""))
    n = bench.get(f"{name}/n")
    checks = []
    for percentile, limit_ms in (("p95", params.max_p95_ms), ("p99", params.max_p99_ms)):
        bound_ms, rank = (
            bench.get(f"{name}/{percentile}_bound_ms"),
            bench.get(f"{name}/{percentile}_bound_rank"),
        )
        check = _at_most(
            f"{name} on {device}: {percentile.upper()} latency, 99 % bound",
            bound_ms,
            limit_ms,
            unit="ms",
            n=n,
            evidence=f"benchmark/{device}.json, order statistic {rank} of {n}",
        )
        if flags and bound_ms is not None:  # an interrupted process measured the host, not the model
            check = Check(
                **(asdict(check) | {"verdict": "inconclusive", "evidence": f"latency invalid: {flags}"})
            )
        checks.append(check)
    checks.append(
        _at_most(
            f"{name} on {device}: peak memory",
            bench.get(f"{name}/peak_memory_mb"),
            params.max_peak_memory_mb,
            unit="MiB",
            n=None,
            evidence=f"benchmark/{device}.json {name}/peak_memory_mb",
            required=False,  # not every system exposes it
        )
    )
    return checks


def evaluate(
    convert: Mapping[str, Any],
    parity: Mapping[str, Any],
    benchmarks: Mapping[str, Mapping[str, Any]],
    params: GateParams,
) -> list[Check]:
    """All checks of a build.

    Args:
        convert: reports/convert.json; its variants are the ones judged.
        parity: reports/parity.json.
        benchmarks: Device name to reports/benchmark/DEVICE.json.
        params: The thresholds.
    """
    checks: list[Check] = []
    for name in sorted({key.split("/")[0] for key in convert if "/" in key}):
        size_mb = convert[f"{name}/size_bytes"] / 1e6
        checks += _accuracy_checks(name, parity, params)
        checks += _parity_checks(name, parity, params)
        evidence = f"convert.json {name}/size_bytes"
        checks.append(
            _at_most(f"{name}: model size", size_mb, params.max_size_mb, unit="MB", n=None, evidence=evidence)
        )
        for device, bench in sorted(benchmarks.items()):
            checks += _device_checks(name, device, bench, params)
    return checks + _not_yet_measured()


def _not_yet_measured() -> list[Check]:
    """What a release needs and a build cannot show: absent evidence is said, never passed."""
    absent = (
        ("champion comparison", f"no champion is compared yet; needs n >= {_MIN_N_CHAMPION}"),
        ("oldest engine in the field", "no older engine is run by a build"),
        ("stability run", "no continuous run belongs to a build"),
    )
    return [
        Check(
            name=name,
            measured=None,
            threshold=None,
            unit="",
            n=None,
            verdict="not measured",
            evidence=why,
            required=False,
        )
        for name, why in absent
    ]


def overall(checks: list[Check]) -> Literal["pass", "fail"]:
    """One failed check refuses the build; so does a required one that was not measured."""
    refused = any(c.verdict == "fail" or (c.required and c.verdict == "not measured") for c in checks)
    return "fail" if refused else "pass"


def markdown(verdict: str, checks: list[Check]) -> str:
    """The gate table a reviewer reads, refusals first; it becomes the registered version's description."""
    counts = {v: sum(c.verdict == v for c in checks) for v in _BY_SEVERITY}
    head = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    rows = ["| check | measured | threshold | unit | n | verdict |", "|---|---|---|---|---|---|"]
    for c in sorted(checks, key=lambda c: _BY_SEVERITY.index(c.verdict)):
        cells = (c.name, _shown(c.measured), _shown(c.threshold), c.unit, _shown(c.n), f"**{c.verdict}**")
        rows.append(f"| {' | '.join(cells)} |")
    return f"**Gate: {verdict}** ({head})\n\n" + "\n".join(rows) + "\n"


def _shown(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def evidence(workspace: Path, devices: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of every file a verdict rests on: the converted models, their cards, and the reports judged."""
    reports = workspace / REPORTS
    files = [reports / "convert.json", reports / "parity.json"]
    files += [reports / "benchmark" / f"{device}.json" for device in devices]
    files += (workspace / "models" / "mnn").glob("*/*")
    return {
        file.relative_to(workspace).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
        if file.is_file()
    }


def evidence_sha256(files: Mapping[str, str], checks: list[dict[str, Any]]) -> str:
    """One hash over the files judged and the judgement: thresholds, measured values, verdicts."""
    return hashlib.sha256(json.dumps([files, checks], sort_keys=True).encode()).hexdigest()


def _require_same_bytes(device: str, bench: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """Refuse a benchmark of models that are not the ones that lie there."""
    for path, digest in files.items():
        if not path.endswith("/model.mnn"):
            continue
        variant = Path(path).parent.name
        measured = bench.get(f"{variant}/mnn_sha256")
        if measured != digest:
            raise UserError(
                f"reports/benchmark/{device}.json measured {variant} with SHA-256 {measured}",
                allowed=f"a measurement of the file that lies there, {digest}",
                next_step=f"`dvc repro benchmark@{device}`; take devices that are gone out of gate.devices",
            )


def gate(workspace: Path, params: GateParams) -> dict[str, Any]:
    """Judge a workspace: writes reports/gate.md and returns what reports/gate.json holds.

    Raises:
        UserError: a report is missing, measured other bytes, or is of a device that is not judged.
    """
    reports = workspace / REPORTS
    foreign = sorted({path.stem for path in (reports / "benchmark").glob("*.json")} - set(params.devices))
    if foreign:
        raise UserError(
            f"reports/benchmark holds reports of {', '.join(foreign)}",
            allowed=f"reports of gate.devices: {', '.join(params.devices)}",
            next_step="delete the reports of devices that are gone, or add the device to gate.devices",
        )
    devices = {name: read_json(reports / "benchmark" / f"{name}.json") for name in params.devices}
    convert, parity = read_json(reports / "convert.json"), read_json(reports / "parity.json")
    files = evidence(workspace, params.devices)
    for device, bench in devices.items():
        _require_same_bytes(device, bench, files)
    checks = evaluate(convert, parity, devices, params)
    verdict = overall(checks)
    write_text(reports / "gate.md", markdown(verdict, checks))
    records = [asdict(check) for check in checks]
    return {
        "verdict": verdict,
        "evidence": files,
        "evidence_sha256": evidence_sha256(files, records),
        "checks": records,
    }


def require_judged(workspace: Path, report: Mapping[str, Any]) -> None:
    """Refuse files that are not the ones reports/gate.json speaks of.

    Raises:
        UserError: a model, card or report changed since, or the verdict itself was edited.
    """
    devices = tuple(Path(file).stem for file in report["evidence"] if file.startswith("reports/benchmark/"))
    differing = sorted(set(evidence(workspace, devices).items()) ^ set(report["evidence"].items()))
    if differing or evidence_sha256(report["evidence"], report["checks"]) != report["evidence_sha256"]:
        raise UserError(
            f"{differing[0][0] if differing else 'reports/gate.json'} is not what the gate judged",
            allowed="models, cards and reports as they were when the gate passed",
            next_step="`dvc checkout --force`, or delete the file, then `edgeloop build`",
        )


def main() -> None:
    """`python -m tasks.gate` writes reports/gate.json and reports/gate.md."""
    with stage("gate", GateParams) as run:
        run.report(gate(Path(), run.params))


if __name__ == "__main__":
    main()
