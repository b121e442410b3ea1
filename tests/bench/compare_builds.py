"""Two builds of one preset that differ in one setting, side by side: what an option costs and brings.

    python tests/bench/compare_builds.py relu6 --preset clothing --set train.activation=relu6 --seeds 0 1 2

Each build runs in a scratch clone of the last commit that shares this repository's DVC cache, so what was
built before is taken from there. A seed is that of training, pruning and QAT alike.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from report import FOLDER, conditions, parser, write

from tasks.results import collect
from tasks.workspace import Workspace, workspaces

ROOT = Path(__file__).resolve().parents[2]
_SEEDED = ("train", "prune", "quantize")


def build(workspace: Workspace, committed: str, changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """The record of `tasks.results` of one build with `changes`, as section.key: value, to the preset."""
    params = yaml.safe_load(committed)
    seeds = {f"{section}.seed": seed for section in _SEEDED} if seed else {}
    for name, value in (seeds | changes).items():
        *sections, key = name.split(".")
        section = params
        for inner in sections:
            section = section.setdefault(inner, {})
        section[key] = value
    # Unchanged params are written as they were: DVC then finds what was built from them.
    text = yaml.safe_dump(params, sort_keys=False) if params != yaml.safe_load(committed) else committed
    (workspace.path / "params.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "flows", "build", "--preset", workspace.name, "--json"]
    done = subprocess.run(command, cwd=workspace.repository, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: the gate refused, which is a result
        sys.exit(f"the build with {changes} ended with {done.returncode}")
    return collect(workspace.path)


def rows(builds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row a setting and variant, medians over the seeds."""
    table = []
    for setting, records in builds.items():
        for variant in (row["name"] for row in records[0]["variants"]):
            of = [next(r for r in record["variants"] if r["name"] == variant) for record in records]
            top1 = [100 * r["top1"] for r in of]
            table.append(
                {
                    "setting": setting,
                    "variant": variant,
                    "top-1 %": f"{statistics.median(top1):.2f} ({min(top1):.2f} to {max(top1):.2f})",
                    "size MB": of[0]["size_bytes"] / 1e6,
                    "P50 ms": statistics.median(r["latency_ms"]["p50"] for r in of),
                    "noisy runs": sum(bool(r["flags"]) for r in of),
                    "same prediction as torch %": 100 * statistics.median(r["agreement"] for r in of),
                    "int8 ops": of[0]["int8_ops"] or 0,
                    "test n": of[0]["test_n"],
                    "seeds": len(of),
                }
            )
    return table


def main() -> None:
    """Parse, build, write the result."""
    asked_for = parser(__doc__)
    asked_for.add_argument("name", help="of the result")
    asked_for.add_argument("--preset", required=True)
    asked_for.add_argument("--set", nargs="+", required=True, help="SECTION.KEY=VALUE, YAML values")
    asked_for.add_argument("--seeds", nargs="+", type=int, default=[0])
    chosen = asked_for.parse_args()
    changes = {name: yaml.safe_load(value) for name, value in (item.split("=", 1) for item in chosen.set)}
    settings: dict[str, dict[str, Any]] = {"as in the preset": {}, " ".join(chosen.set): changes}
    with tempfile.TemporaryDirectory(prefix="edgeloop-compare-") as folder:
        clone = Path(folder) / "main"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        (clone.parent / "shared").symlink_to(ROOT.parent / "shared")
        cache = ["dvc", "cache", "dir", "--local", str(ROOT / ".dvc" / "cache")]
        subprocess.run([sys.executable, "-m", *cache], cwd=clone, check=True)
        workspace = workspaces(clone)[chosen.preset]
        committed = (workspace.path / "params.yaml").read_text(encoding="utf-8")
        builds = {
            setting: [build(workspace, committed, changes, seed) for seed in chosen.seeds]
            for setting, changes in settings.items()
        }
    write(
        FOLDER / f"{chosen.name}.json",
        {
            "title": f"{chosen.preset}: {' '.join(chosen.set)}",
            "command": f"python tests/bench/compare_builds.py {chosen.name} --preset {chosen.preset} --set "
            f"{' '.join(chosen.set)} --seeds {' '.join(map(str, chosen.seeds))}",
            "text": "Top-1 in MNN on the test set: median (least to most) over the seeds of training, pruning"
            " and QAT. Latency on one thread of this host.",
            "conditions": conditions(seeds=chosen.seeds),
            "rows": rows(builds),
            "builds": builds,
        },
    )


if __name__ == "__main__":
    main()
