"""A small workspace for the gate with real files: models, cards, reports, predictions, a champion."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fleet.device.preprocess import Preprocess
from tasks.champion import Champion, ChampionVariant, write_champion
from tasks.gate import GateParams, gate
from tasks.stage import write_json

FP32, PRUNED, INT8 = VARIANTS = "mbv3s-p0-fp32-r32", "mbv3s-p30-fp32-r32", "mbv3s-p30-i8-r32"
CLASSES = 10
PREPROCESS = Preprocess(size_px=32)


@dataclass(kw_only=True)
class GateWorkspace:
    """A good build of three variants, judged on `n` test images of ten classes; change it, then `write`."""

    path: Path
    n: int = 2500
    wrong_then: int = 125
    """Images the champion gets wrong: the first of each class, in turn."""
    champion: bool = True
    released: bool = False
    """Whether the champion is this very build."""
    models: dict[str, bytes] = field(default_factory=lambda: {name: name.encode() for name in VARIANTS})
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    convert: dict[str, Any] = field(default_factory=dict)
    parity: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=lambda: {"engine_version": "3.6.1"})
    labels: list[str] = field(default_factory=lambda: [f"class {c}" for c in range(CLASSES)])

    def __post_init__(self) -> None:
        self.label = np.arange(self.n) % CLASSES
        self.then = self.label.copy()
        self.then[: self.wrong_then] = (self.label[: self.wrong_then] + 1) % CLASSES
        self.now = {name: self.then.copy() for name in VARIANTS}
        for name in VARIANTS:
            self.cards[name] = {
                "engine_version": "3.6.1",
                "labels": self.labels,
                "mnn_sha256": digest(self.models[name]),
                "preprocess": PREPROCESS.to_dict(),
                "preprocess_sha256": PREPROCESS.digest(),
            }
            self.convert[f"{name}/size_bytes"] = len(self.models[name])
            self.parity |= {f"{name}/{key}": value for key, value in self._parity(name).items()}
            self.bench |= {f"{name}/{key}": value for key, value in self._bench(name).items()}

    def _parity(self, name: str) -> dict[str, Any]:
        return {
            "n": self.n,
            "elementwise_n": 64,
            "agreement": 1.0,
            "parity_ok": 1,
            "reason": "",
            "first_diverging_layer": "",
            "max_rel_error": 1e-6,
            "tolerance_rel": 1e-4,
            "int8_ops_count": 94 if name == INT8 else 0,
            "mnn_sha256": digest(self.models[name]),
            "preprocess_sha256": PREPROCESS.digest(),
        }

    def _bench(self, name: str) -> dict[str, Any]:
        return {
            "mnn_sha256": digest(self.models[name]),
            "n": 500,
            "flags": "",
            "p95_bound_ms": 1.0,
            "p95_bound_rank": 487,
            "p99_bound_ms": 2.0,
            "p99_bound_rank": 500,
            "peak_memory_mb": 20.0,
        }

    def lose(self, name: str, label: int, count: int) -> None:
        """Answer `count` images of a class wrong that were right."""
        right = np.flatnonzero((self.label == label) & (self.now[name] == self.label))[:count]
        assert len(right) == count
        self.now[name][right] = (label + 1) % CLASSES

    def gain(self, name: str, label: int, count: int) -> None:
        """Answer `count` images of a class right that were wrong."""
        wrong = np.flatnonzero((self.label == label) & (self.now[name] != self.label))[:count]
        assert len(wrong) == count
        self.now[name][wrong] = label

    def write(self, *, top1: bool = True) -> "GateWorkspace":
        """Write all files; with `top1` parity.json says what the predictions come to."""
        for name, content in self.models.items():
            folder = self.path / "models" / "mnn" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "model.mnn").write_bytes(content)
            write_json(folder / "card.json", self.cards[name])
        for name, answers in self.now.items():
            if top1:
                self.parity[f"{name}/top1"] = float((answers == self.label)[self.label >= 0].mean())
        write_json(self.path / "reports" / "convert.json", self.convert)
        write_json(self.path / "reports" / "parity.json", self.parity)
        write_json(self.path / "reports" / "benchmark" / "local.json", self.bench)
        write_json(self.path / "reports" / "probe" / "local.json", self.probe)
        self._predictions(self.now, self.path / "models" / "parity" / "predictions.parquet")
        self._write_champion()
        return self

    def _predictions(self, answers: dict[str, np.ndarray], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        images = [digest(str(number).encode()) for number in range(self.n)]
        table = pd.DataFrame({"sha256": images, "label": self.label, **answers})
        table.astype(dict.fromkeys(["label", *answers], "int16")).to_parquet(path, index=False)

    def _write_champion(self) -> None:
        if not self.champion:
            write_champion(self.path / "champion")
            return
        source = self.path / "champion.parquet"
        self._predictions(dict.fromkeys(VARIANTS, self.then), source)
        top1 = float((self.then == self.label).mean())
        digests = {name: digest(self.models[name]) if self.released else "ab" * 32 for name in VARIANTS}
        record = Champion(
            name="edgeloop-x",
            version=3,
            release_sha256="cd" * 32,
            evidence_sha256="ef" * 32,
            git_commit="0" * 40,
            labels=tuple(f"class {c}" for c in range(CLASSES)),
            variants={n: ChampionVariant(mnn_sha256=d, size_bytes=10, top1=top1) for n, d in digests.items()},
            predictions_sha256=digest(source.read_bytes()),
        )
        write_champion(self.path / "champion", record, source)

    def judge(self, **params: Any) -> dict[str, Any]:
        """The gate's report, written where the stage writes it."""
        report = gate(self.path, GateParams(**params))
        write_json(self.path / "reports" / "gate.json", report)
        return json.loads((self.path / "reports" / "gate.json").read_text(encoding="utf-8"))


def digest(content: bytes) -> str:
    """SHA-256 as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def by_verdict(report: dict[str, Any], verdict: str) -> dict[str, dict[str, Any]]:
    """The checks with one verdict, by name."""
    return {check["name"]: check for check in report["checks"] if check["verdict"] == verdict}
