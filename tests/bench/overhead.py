"""What share of `edgeloop build` is not stages computing: process starts, imports, DVC, Prefect, MLflow.

    python tests/bench/overhead.py [PRESET]      a whole build in a fresh clone; prints JSON

A stage's seconds are those inside its frame (reports/measured/seconds), so its imports count as overhead. On
a machine that is busy with other work CPU seconds say more. The second build has nothing to do.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from clones import clone_repository, edgeloop

from tasks.workspace import workspaces

_DVC_LOCK = "dvc.lock"


def measure(preset: str, clone: Path) -> dict[str, Any]:
    """Build `preset` in `clone` from nothing, then once more.

    Returns:
        Seconds of the command, of each stage's computation, and the share that is neither.
    """
    workspace = workspaces(clone)[preset].path
    (workspace / _DVC_LOCK).unlink(missing_ok=True)
    load_before = os.getloadavg()[0]
    wall_s, cpu_s = _timed_build(preset, clone)
    files = sorted((workspace / "reports" / "measured" / "seconds").glob("*.json"))
    stages = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
    compute_s, compute_cpu_s = (sum(s[key] for s in stages.values()) for key in ("seconds", "cpu_seconds"))
    return {
        "preset": preset,
        "cores_count": os.cpu_count(),
        "load_1min_before": round(load_before, 2),
        "wall_s": round(wall_s, 1),
        "compute_s": round(compute_s, 1),
        "overhead_s": round(wall_s - compute_s, 1),
        "overhead_share": round(1 - compute_s / wall_s, 3),
        "cpu_s": round(cpu_s, 1),
        "compute_cpu_s": round(compute_cpu_s, 1),
        "overhead_cpu_share": round(1 - compute_cpu_s / cpu_s, 3),
        "stages": stages,
        "nothing_to_do_s": round(_timed_build(preset, clone)[0], 1),
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="tiny")
    preset = parser.parse_args().preset
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        print(json.dumps(measure(preset, clone_repository(Path(folder) / "edgeloop")), indent=1))


if __name__ == "__main__":
    main()
