"""What share of `edgeloop build` is not stages computing: process starts, imports, DVC, Prefect, MLflow.

    python tests/bench/overhead.py [PRESET]      a whole build in a fresh clone, then one with nothing to do

A stage's seconds are those inside its frame (reports/measured/seconds), so its imports count as overhead. On
a machine that is busy with other work CPU seconds say more than seconds do.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import FOLDER, conditions, parser, write

for folder in (2, 1):  # the second for `clones`; the first so that `fleet` is not tests/fleet
    sys.path.insert(0, str(Path(__file__).resolve().parents[folder]))
from clones import clone_repository, edgeloop  # noqa: E402  # as above

from tasks.workspace import workspaces  # noqa: E402

_TEXT = (
    "A stage's seconds are those inside its frame; its process start and imports count as overhead, as do"
    " DVC, Prefect, registration and waiting for MLflow. CPU seconds are those of all processes but the one"
    " that carries runs to MLflow. The budget is 25 % on digits; a build with nothing to do has 3 s."
)


def measure(preset: str, clone: Path) -> dict[str, Any]:
    """Build `preset` in `clone` from nothing, then once more; the record that `report.write` takes."""
    workspace = workspaces(clone)[preset].path
    (workspace / "dvc.lock").unlink(missing_ok=True)
    said = conditions(preset=preset, n=1)
    wall_s, cpu_s = _timed_build(preset, clone)
    files = sorted((workspace / "reports" / "measured" / "seconds").glob("*.json"))
    stages = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
    computed_s, computed_cpu_s = (sum(s[key] for s in stages.values()) for key in ("seconds", "cpu_seconds"))
    nothing_s, nothing_cpu_s = _timed_build(preset, clone)
    parts = {
        **{f"stage {name}": (s["seconds"], s["cpu_seconds"]) for name, s in stages.items()},
        "overhead": (wall_s - computed_s, cpu_s - computed_cpu_s),
        "whole build": (wall_s, cpu_s),
    }
    rows = [
        {"part": part, "s": s, "share %": 100 * s / wall_s, "CPU s": cpu, "CPU share %": 100 * cpu / cpu_s}
        for part, (s, cpu) in parts.items()
    ]
    rows.append(
        {
            "part": "build with nothing to do",
            "s": nothing_s,
            "share %": "",
            "CPU s": nothing_cpu_s,
            "CPU share %": "",
        }
    )
    return {
        "title": f"What a build of {preset} takes beside its stages",
        "command": f"python tests/bench/overhead.py {preset}",
        "text": _TEXT,
        "conditions": said,
        "rows": rows,
    }


def _timed_build(preset: str, clone: Path) -> tuple[float, float]:
    """Seconds, and CPU seconds of all processes but the one that carries runs to MLflow."""
    started, cpu = time.monotonic(), sum(os.times()[2:4])
    done = edgeloop(clone, "build", "--preset", preset, "--json")
    wall_s = time.monotonic() - started
    if done.returncode not in (0, 1):  # 1: refused by the gate, which takes as long
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
    return wall_s, sum(os.times()[2:4]) - cpu


def main() -> None:
    """Measure in a clone that is removed afterwards."""
    asked_for = parser(__doc__)
    asked_for.add_argument("preset", nargs="?", default="digits")
    asked_for.add_argument("--out", type=Path, default=FOLDER / "overhead.json")
    chosen = asked_for.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        write(chosen.out, measure(chosen.preset, clone_repository(Path(folder) / "edgeloop")))


if __name__ == "__main__":
    main()
