"""Workspaces of evidence alone: what a build, a refusal, a champion or an attacker leaves behind."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.judge.evidence import evidence, evidence_sha256
from tasks.stage import write_json

VARIANTS = ("mbv3s-p0-fp32-r48", "mbv3s-p30-fp32-r48", "mbv3s-p30-i8-r48")
"""From the float parent to the release candidate."""
HOSTILE = (
    "<script>alert(1)</script>",
    "{{ 7 * 7 }} {% raw %}",
    "a" * 300,
    "\u202e\u05d0\u05d1\u05d2 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 30,
    '"><img src=x onerror=alert(1)>',
    "line\nbreak\x00\x1b[31m",
    "]]>&amp;'`${x}",
)
THEN = "root: .\nquantize:\n  epochs: 5\n  skip: [first, last]\ngate: {}\n"
NOW = "root: ../..\nquantize:\n  epochs: 2\n  skip: [first, last]\n  seed: 1\ngate: {}\n"
CLASSES = tuple(f"class {number}" for number in range(6))


@dataclass(frozen=True)
class Spec:
    """What to make."""

    labels: tuple[str, ...] = CLASSES
    n: int = 240
    refused: bool = False
    champion: bool = False
    waived: bool = False
    samples: bool = True
    side_px: int = 32


def make_workspace(folder: Path, spec: Spec = Spec()) -> Path:
    """Write all evidence of one build; the same spec gives the same bytes."""
    random = np.random.default_rng(0)
    (folder / ".dvc").mkdir(parents=True, exist_ok=True)  # a repository of its own: a workspace called digits
    _dataset(folder / "data/prepared", spec, random)
    predictions = _predictions(folder, spec, random)
    _models(folder, spec)
    _reports(folder, spec, predictions)
    if spec.samples:
        _bench_files(folder, random)
    _gate(folder, spec, _champion(folder, spec, predictions, random) if spec.champion else {})
    return folder


def _dataset(folder: Path, spec: Spec, random: np.random.Generator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = random.integers(0, 256, (spec.n, spec.side_px, spec.side_px, 3), np.uint8)
    np.save(folder / "test-000.npy", images)
    (folder / "labels.json").write_text(json.dumps(spec.labels), encoding="utf-8")
    sha256 = sorted(hashlib.sha256(str(i).encode()).hexdigest() for i in range(spec.n))
    rows = pd.DataFrame(
        {"sha256": sha256, "label": np.arange(spec.n) % len(spec.labels), "row": range(spec.n)}
    )
    for name, value in (
        ("split", "test"),
        ("source", "x"),
        ("group", ""),
        ("origin", "base"),
        ("added_in", ""),
    ):
        rows[name] = value
    rows["width"], rows["height"], rows["shard"] = spec.side_px, spec.side_px, "test-000.npy"
    rows.to_parquet(folder / "manifest.parquet")


def _predictions(folder: Path, spec: Spec, random: np.random.Generator) -> pd.DataFrame:
    """Every variant errs somewhat more than the one before; class 1 is the one int8 takes for class 2."""
    manifest = pd.read_parquet(folder / "data/prepared/manifest.parquet")
    frame = pd.DataFrame({"sha256": manifest["sha256"], "label": manifest["label"].astype(np.int16)})
    truth = frame["label"].to_numpy()
    for index, name in enumerate(VARIANTS):
        wrong = random.random(spec.n) < 0.03 * (index + 1)
        frame[name] = np.where(wrong, (truth + 1) % len(spec.labels), truth).astype(np.int16)
    chosen = np.flatnonzero(truth == 1)[: max(1, spec.n // len(spec.labels) // 2)]
    frame.loc[chosen, VARIANTS[1]] = 1
    frame.loc[chosen, VARIANTS[2]] = 2
    path = folder / "models/parity/predictions.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path, index=False)
    return frame


def _models(folder: Path, spec: Spec) -> None:
    for name in VARIANTS:
        model = folder / "models/mnn" / name / "model.mnn"
        model.parent.mkdir(parents=True, exist_ok=True)
        model.write_bytes(name.encode())
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        card = {"variant": name, "labels": spec.labels, "engine_version": "3.6.1", "mnn_sha256": sha256}
        write_json(model.with_name("card.json"), card)


def _reports(folder: Path, spec: Spec, predictions: pd.DataFrame) -> None:
    reports = folder / "reports"
    convert, parity, bench = {}, {}, {"device": "local"}
    for index, name in enumerate(VARIANTS):
        right = int((predictions[name] == predictions["label"]).sum())
        convert[f"{name}/size_bytes"] = (6_112_640, 3_070_496, 863_092)[index]
        parity |= {
            f"{name}/top1": right / spec.n, f"{name}/n": spec.n, f"{name}/agreement": 1.0,
            f"{name}/max_rel_error": 1.17e-6 * 10**index, f"{name}/int8_ops_count": 94 * (index == 2),
        }  # fmt: skip
        p50 = (0.2, 0.12, 0.15)[index]
        bench |= {
            f"{name}/n": 500, f"{name}/p50_ms": p50, f"{name}/p90_ms": p50 * 1.1, f"{name}/p95_ms": p50 * 1.3,
            f"{name}/p99_ms": p50 * 2, f"{name}/max_ms": p50 * 3, f"{name}/p95_bound_ms": p50 * 1.4,
            f"{name}/p95_bound_rank": 487, f"{name}/p99_bound_ms": p50 * 3, f"{name}/p99_bound_rank": 500,
            f"{name}/load_ms": 20.0, f"{name}/first_ms": 0.5, f"{name}/end_to_end_p50_ms": p50 * 2,
            f"{name}/peak_memory_mb": 17.5 - 4 * index, f"{name}/load_memory_mb": 13.0,
            f"{name}/flags": "noisy" * (index == 0),
        }  # fmt: skip
    write_json(reports / "convert.json", convert)
    write_json(reports / "parity.json", parity)
    write_json(reports / "benchmark/local.json", bench)
    write_json(reports / "probe/local.json", {"soc": "A CPU", "cores_count": 2, "os_build": "Linux 6"})
    write_json(reports / "train.json", {"macs_count": 4_153_736})
    write_json(reports / "prune.json", {"macs_count": 2_076_496})
    (reports / "prune_ladder.csv").write_text(
        "ratio,channels_removed_ratio,macs_count,params_count,val_top1_pruned,val_top1\n"
        "0.0000,0.0000,4153736,1528106,0.9778,0.9778\n0.2000,0.1961,2864736,994594,0.9500,0.9722\n"
        "0.3000,0.3019,2076496,765730,0.8944,0.9722\n",
        encoding="utf-8",
    )
    layers = "".join(
        f"{i + 1},int8,,features.{i}.block.{i % 4}.0,{29 + i / 2:.4f},0.999,{20 - 3 * (i % 9):.4f},0.997\n"
        for i in range(40)
    )
    (reports / "quantize_layers.csv").write_text(
        "rank,precision,reason,layer,snr_db,cosine,snr_in_place_db,cosine_in_place\n" + layers
        + ",float,skipped by rule 'first',features.0.0,,,,\n",
        encoding="utf-8",
    )  # fmt: skip


def _bench_files(folder: Path, random: np.random.Generator) -> None:
    rows = []
    for index, name in enumerate(VARIANTS):
        for config, factor in (("t1-normal-normal", 1.0), ("t2-low-low", 0.7)):
            ms = (0.2, 0.12, 0.15)[index] * factor * random.lognormal(0, 0.12, 300)
            ms[::20] *= 1.8
            rows.append(
                pd.DataFrame(
                    {
                        "variant": name,
                        "config": config,
                        "round": 0,
                        "phase": "steady",
                        "index": range(300),
                        "latency_ms": ms,
                    }
                )
            )
    pd.concat(rows).to_parquet(folder / "reports/benchmark/local_samples.parquet", index=False)
    lines = [
        f"{name},features.{i}.block.0.0,Convolution,{int(index == 2)},{0.02 / (i + 1):.5f},"
        f"{0.3 / (i + 1):.4f},{int(i == 0)},{'12 times its peers: probably a fallback' if i == 0 else ''}"
        for index, name in enumerate(VARIANTS) for i in range(14)
    ]  # fmt: skip
    head = "variant,layer,op_type,int8,p50_ms,share,outlier,why\n"
    (folder / "reports/benchmark/local_layers.csv").write_text(
        head + "\n".join(lines) + "\n", encoding="utf-8"
    )


def _champion(folder: Path, spec: Spec, predictions: pd.DataFrame, random: np.random.Generator) -> dict:
    """A champion with its classes in another order, one image fewer, and what the gate says of it."""
    labels = spec.labels[::-1]
    truth = predictions["label"].to_numpy()
    said = np.where(random.random(spec.n) < 0.02, (truth + 3) % len(labels), truth)
    frame = predictions[["sha256", "label"]].copy()
    frame["label"], frame[VARIANTS[2]] = len(labels) - 1 - truth, (len(labels) - 1 - said).astype(np.int16)
    (folder / "champion").mkdir(exist_ok=True)
    frame.iloc[1:].to_parquet(folder / "champion/predictions.parquet", index=False)
    variants = {
        VARIANTS[2]: {"mnn_sha256": "0" * 64, "size_bytes": 900_000, "top1": float((said == truth).mean())}
    }
    (folder / "champion/params.yaml").write_text(THEN, encoding="utf-8")
    (folder / "params.yaml").write_text(NOW, encoding="utf-8")
    write_json(folder / "champion/champion.json", {
        "name": "edgeloop-digits", "version": 3, "release_sha256": "1" * 64, "evidence_sha256": "2" * 64,
        "git_commit": "3" * 40, "labels": labels, "variants": variants, "predictions_sha256": "4" * 64,
        "params_sha256": hashlib.sha256(THEN.encode()).hexdigest(),
    })  # fmt: skip
    return {VARIANTS[2]: {
        "same_file": False,
        "against": VARIANTS[2], "n": spec.n - 1, "drop_pp": 0.84, "interval_pp": [-0.4, 2.1],
        "classes": [{"label": label, "n": 40, "champion": 0.9, "candidate": 0.8} for label in spec.labels],
    }}  # fmt: skip


def _check(name: str, verdict: str, measured=None, threshold=None, evidence="", **rest: object) -> dict:
    values = {"unit": "", "n": None, "required": True, "measured": measured, "threshold": threshold}
    return values | {"name": name, "verdict": verdict, "evidence": evidence} | rest


def _gate(folder: Path, spec: Spec, comparison: dict) -> None:
    local, floor = f"{VARIANTS[0]} on local", "fail" if spec.refused else "pass"
    noisy = "latency invalid: noisy"
    checks = [
        _check(
            f"{VARIANTS[2]}: accuracy floor", floor, 0.8701, 0.95, "parity.json", n=spec.n, bound="at least"
        ),
        _check(f"{local}: P95 latency, 99 % bound", "inconclusive", 0.36, 50.0, noisy, unit="ms", n=500),
        _check(f"{local}: P99 latency, 99 % bound", "inconclusive", 8.7, 100.0, noisy, unit="ms", n=500),
        _check("oldest engine in the field", "not measured", evidence="no older engine", required=False),
        _check("stability run", "not measured", evidence="no continuous run", required=False),
        *(_check(f"{name}: model size", "pass", 0.86, 10.0, unit="MB") for name in VARIANTS),
    ]
    if spec.waived:
        note = "waived by R. Manager, up to 0.89: the low tier may be half a point below"
        floor = _check(f"{VARIANTS[1]}: accuracy floor", "waived", 0.895, 0.9, n=spec.n, note=note)
        checks.append(floor | {"bound": "at least"})
    report = {
        "verdict": "fail" if spec.refused else "pass",
        "checks": checks,
        "evidence": evidence(folder, ("local",)),
        "comparison": comparison,
    }
    write_json(folder / "reports/gate.json", report | {"evidence_sha256": evidence_sha256(report)})
