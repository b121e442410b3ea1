"""What the device's runtime costs: cycles of loading, releases changed under load, and the size of updates.

    python tests/bench/runtime.py [WORKSPACE]     a built digits workspace; the repository's root if not given

A real repository is served on loopback; the releases run the workspace's models.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from report import FOLDER, conditions, parser, write

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/fleet/device/runtime")]
from release_rig import PHONE, release, serving  # noqa: E402  # as above
from sklearn.datasets import load_digits  # noqa: E402

from fleet.device.engine import ENGINE_VERSION, Session  # noqa: E402
from fleet.device.preprocess import Preprocess  # noqa: E402
from fleet.device.release import Release, TierPlan  # noqa: E402
from fleet.device.runtime import Runtime  # noqa: E402
from fleet.device.runtime.golden import Golden  # noqa: E402
from tasks.release_repository import ReleaseRepository, file_of  # noqa: E402

CYCLES, THREADS, SWAPS = 10_000, 2, 40
VARIANTS = ("mbv3s-p30-fp32-r48", "mbv3s-p30-i8-r48")
_TEXT = (
    "Cycles: load (files hashed, golden inputs run), one answer, unload. Swaps: requests go on in threads"
    " while the device changes from one release to the other and back; `during` are requests that were under"
    " way between an update's start and its end. Publisher, server and device are one process here, so the"
    " requests outside a swap wait for the publisher. Cycles are in a process of their own. Updates: bytes"
    " of all bodies received over HTTP, metadata included."
)


def _plan(workspace: Path, variant: str, folder: Path) -> tuple[TierPlan, list[Path]]:
    """What runs a variant of the workspace, and its files."""
    model = workspace / "models/mnn" / variant / "model.mnn"
    card = json.loads((model.parent / "card.json").read_text(encoding="utf-8"))
    preprocess = Preprocess.from_dict(card["preprocess"])
    images = _images(4)
    with Session(model) as session:
        name = next(iter(session.inputs))
        runs = [session.run({name: preprocess.apply(image)}) for image in images]
    logits = np.concatenate([next(iter(run.values())) for run in runs]).astype(np.float32)
    golden = folder / f"{variant}.npz"
    labels = tuple(map(str, card["labels"]))
    golden.write_bytes(Golden(images=images, logits=logits, labels=labels).to_bytes())
    plan = TierPlan(
        action="run",
        variant=variant,
        model=file_of(model),
        preprocess=preprocess.to_dict(),
        preprocess_sha256=preprocess.digest(),
        config={"backend": "CPU", "threads": 1, "precision": "normal", "memory": "normal"},
        golden=file_of(golden),
        golden_tolerance=1e-3,
        measured=True,
    )
    return plan, [model, golden]


def _images(count: int) -> np.ndarray:
    """Digits as 32 px RGB images."""
    grey = (load_digits().images[:count] * 255 / 16).astype(np.uint8)
    return np.repeat(np.kron(grey, np.ones((1, 4, 4), np.uint8))[..., None], 3, axis=3)


def _cycles(device: Path, root: Path, count: int) -> list[dict[str, Any]]:
    """10,000 times, in a process of its own."""
    program = [sys.executable, Path(__file__).with_name("runtime_cycles.py"), device, root, str(count)]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    read = json.loads(done.stdout)
    memory = read["memory_mb"]
    late = len(memory) // 2
    slope = float(np.polyfit(np.arange(late), memory[-late:], 1)[0]) * len(memory)
    tenth = f"{memory[1]:.2f}, {memory[late - 1]:.2f}, {memory[-1]:.2f}"
    return [
        _row("load, answer, unload", count, "ms each", read["each_ms"]),
        _row("memory after a tenth, a half and all of the cycles", count, "MiB resident", tenth),
        _row("growth over all cycles, fitted to the second half", count, "MiB", round(slope, 3)),
        _row("open files, after each twentieth", count, "distinct counts", len(set(read["open_files"]))),
    ]


def _swaps(runtime: Runtime, repository: ReleaseRepository, url: str, releases: list[Release]) -> list[Any]:
    image, stop = _images(1)[0], threading.Event()
    asked: list[tuple[float, float]] = []
    failures: list[Exception] = []

    def ask() -> None:
        while not stop.is_set():
            started = time.perf_counter()
            try:
                runtime.predict(image)
            except Exception as error:  # noqa: BLE001 - a request that was lost, whatever it was lost to
                failures.append(error)
            asked.append((started, time.perf_counter()))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    spans = []
    for number in range(SWAPS):  # after the four releases of `_updates`
        counter = number + 5
        repository.publish_release(replace(releases[counter % 2], counter=counter), [])
        started = time.perf_counter()
        assert runtime.update(url).release == counter
        spans.append((started, time.perf_counter()))
        while runtime.status().trying:
            time.sleep(0.005)
    stop.set()
    for thread in threads:
        thread.join()
    during = [e - s for s, e in asked if any(s < last and e > first for first, last in spans)]
    outside = [e - s for s, e in asked if not any(s < last and e > first for first, last in spans)]
    update_ms = np.array([last - first for first, last in spans]) * 1e3
    return [
        _row(f"requests in {THREADS} threads over {SWAPS} swaps", len(asked), "lost", len(failures)),
        *_latencies("outside a swap", outside),
        *_latencies("during a swap", during),
        _row("update with swap, under load", SWAPS, "ms, median", float(np.median(update_ms))),
    ]


def _latencies(name: str, seconds: list[float]) -> list[dict[str, Any]]:
    values = np.array(seconds) * 1e3
    return [
        _row(f"request {name}, P50", len(values), "ms", float(np.percentile(values, 50))),
        _row(f"request {name}, P99", len(values), "ms", float(np.percentile(values, 99))),
    ]


def _row(what: str, n: int, unit: str, value: Any) -> dict[str, Any]:
    return {"what": what, "n": n, "value": value, "unit": unit}


def _updates(
    runtime: Runtime, repository: ReleaseRepository, url: str, releases: list[Release], files: list[Path]
) -> list[dict[str, Any]]:
    """Bytes of three updates after the first; leaves release 4, which is good."""
    rows = [_row("update, nothing new", 1, "bytes received", runtime.update(url).bytes_received)]
    changed = [
        ("only the change log of the release changes", replace(releases[1], changes=("text",))),
        ("the model and its golden inputs change", releases[0]),
        ("back to the model before, which is still here", releases[1]),
    ]
    for counter, (what, made) in enumerate(changed, 2):
        repository.publish_release(replace(made, counter=counter), files)
        rows.append(_row(f"update, {what}", 1, "bytes received", runtime.update(url).bytes_received))
        for image in _images(20):
            runtime.predict(image)
    return rows


def _base_environment(folder: Path, url: str, root: bytes) -> list[dict[str, Any]]:
    """The app of docs/runtime.md in an environment of the base dependencies alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = folder / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *project["dependencies"]], check=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    )
    page = (ROOT / "docs/runtime.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (folder / "root.json").write_bytes(root)
    cv2.imwrite(str(folder / "picture.png"), _images(4)[3])
    done = subprocess.run(
        [python, "-c", code.replace("http://127.0.0.1:8480/repository/", url)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    said = ", ".join(done.stdout.split("\n")).strip(", ")
    packages = [p["name"] for p in json.loads(listed.stdout) if p["name"] not in ("pip", "setuptools")]
    what = f"the app of docs/runtime.md with {', '.join(packages)} alone"
    return [_row(what, 1, "what it printed", said)]


def measure(workspace: Path, cycles: int) -> dict[str, Any]:
    """The record that `report.write` takes."""
    said = conditions(engine=f"MNN {ENGINE_VERSION}", models=" and ".join(VARIANTS), threads_a_session=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans, pairs = zip(*(_plan(workspace, variant, folder) for variant in VARIANTS), strict=True)
        files = [path for pair in pairs for path in pair]
        card = json.loads((pairs[0][0].parent / "card.json").read_text(encoding="utf-8"))
        releases = [release(1, plan, labels=tuple(map(str, card["labels"]))) for plan in plans]
        repository = ReleaseRepository.create(folder / "repository", folder / "keys", demo=True)
        repository.publish_release(releases[1], files)
        with (
            serving(folder / "repository") as server,
            Runtime(folder / "device", PHONE, root=repository.root) as runtime,
        ):
            first = runtime.update(server.url)
            for image in _images(20):
                runtime.predict(image)
            rows = [_row("first update", 1, "bytes received", first.bytes_received)]
            rows += _updates(runtime, repository, server.url, releases, files)
            rows += _swaps(runtime, repository, server.url, releases)
            rows += _base_environment(folder, server.url, repository.root)
        rows += _cycles(folder / "device", folder / "root.json", cycles)
    sizes = {variant: file_of(pair[0]).length for variant, pair in zip(VARIANTS, pairs, strict=True)}
    return {
        "title": "What the runtime costs",
        "command": "python tests/bench/runtime.py",
        "text": _TEXT,
        "conditions": {**said, "model_bytes": ", ".join(f"{v} {size:,}" for v, size in sizes.items())},
        "rows": rows,
    }


def main() -> None:
    """Measure, and write docs/results/runtime.{json,md}."""
    asked_for = parser(__doc__)
    asked_for.add_argument("workspace", type=Path, nargs="?", default=ROOT)
    asked_for.add_argument("--cycles", type=int, default=CYCLES)
    arguments = asked_for.parse_args()
    write(FOLDER / "runtime.json", measure(arguments.workspace, arguments.cycles))


if __name__ == "__main__":
    main()
