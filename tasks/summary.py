"""The headline numbers of a build, gathered from its stages' reports."""

from pathlib import Path
from typing import Any

from tasks.judge.check import names_in
from tasks.stage import read_json
from tasks.variants import Variant


def variants(reports: Path) -> list[dict[str, Any]]:
    """The headline numbers of every variant, gathered from the stages' reports."""
    convert, parity = read_json(reports / "convert.json"), read_json(reports / "parity.json")
    trained, pruned = (read_json(reports / f"{name}.json")["macs_count"] for name in ("train", "prune"))
    devices = sorted(
        (reports / "benchmark").glob("*.json"), key=lambda path: (path.stem != "local", path.stem)
    )
    benchmark = read_json(devices[0])
    return [
        {
            "name": name,
            "top1": parity[f"{name}/top1"],
            "size_bytes": convert[f"{name}/size_bytes"],
            "macs": pruned if Variant.parse(name).pruned_percent else trained,
            "latency_ms": {p: benchmark[f"{name}/{p}_ms"] for p in ("p50", "p95", "p99")},
            "parity_max_rel_error": parity[f"{name}/max_rel_error"],
            "agreement": parity[f"{name}/agreement"],
            "flags": benchmark[f"{name}/flags"].split(),
        }
        for name in names_in(convert)
    ]
