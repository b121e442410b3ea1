"""Running a model in ONNX Runtime or MNN in a child process that may crash, hang or eat memory.

The children are `tasks/mnn/onnx_child.py`; arrays travel through files in a temporary folder.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fleet.device.errors import EngineError
from fleet.lab.child import run_child

Array = npt.NDArray[Any]
Outputs = dict[str, Array]
Side = Literal["reference", "optimized", "engine"]


@dataclass(frozen=True)
class Planned:
    """One run: what goes in, and whether it starts a new session."""

    feeds: Mapping[str, Array]
    fresh: bool = True


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of one run."""

    outputs: Outputs | None
    """None when the run failed or was never reached."""
    error: str = ""


def run_plan(
    side: Side, model: Path, plan: Sequence[Planned], *, timeout_s: float, malloc_fill: int | None = None
) -> list[Done]:
    """Run every entry of `plan`.

    Args:
        side: ONNX Runtime with (`optimized`) or without (`reference`) graph optimisations, or MNN (`engine`).
        model: The .onnx or .mnn file.
        plan: The runs, in order.
        timeout_s: Limit for all of them together.
        malloc_fill: Byte that fresh memory is filled with, so that values read before they were written
            differ from run to run; None leaves the allocator alone.

    Returns:
        One entry a run. A crash or time-out is the error of every run that has no result.
    """
    with tempfile.TemporaryDirectory(prefix="edgeloop-runs-") as name:
        folder = Path(name)
        _write_plan(folder, plan)
        end = _wait([side, str(model.resolve()), name], timeout_s, malloc_fill)
        return [_read(folder, index, end) for index in range(len(plan))]


def run_bisect(
    onnx_path: Path, mnn: Path, feeds: Mapping[str, Array], *, tolerance: float, timeout_s: float
) -> dict[str, str] | None:
    """The first diverging layer as `op`, `node` and `text`; None when the child finds none or fails."""
    with tempfile.TemporaryDirectory(prefix="edgeloop-bisect-") as name:
        folder = Path(name)
        _write_plan(folder, [Planned(feeds)])
        _wait(["bisect", str(mnn), name, str(onnx_path), str(tolerance)], timeout_s, None)
        found = folder / "bisect.json"
        return json.loads(found.read_text(encoding="utf-8")) if found.exists() else None


def run_fold(model: Path, folded: Path, *, timeout_s: float) -> None:
    """Write `model` to `folded` with its batch norms in the convolutions.

    Raises:
        EngineError: ONNX Runtime cannot load it.
    """
    with tempfile.TemporaryDirectory(prefix="edgeloop-fold-") as name:
        _write_plan(Path(name), [])
        if end := _wait(["fold", str(model.resolve()), name], timeout_s, None):
            raise EngineError("ONNX Runtime cannot load the model to calibrate it", engine_said=end)
        shutil.copyfile(Path(name) / "folded.onnx", folded)


def run_measure(
    model: Path, feeds: Sequence[Mapping[str, Array]], ends: Array | None, *, timeout_s: float
) -> npt.NDArray[np.float64]:
    """The largest |value| of each output over all inputs or, given these as `ends`, histograms up to them.

    Raises:
        EngineError: ONNX Runtime cannot run it.
    """
    with tempfile.TemporaryDirectory(prefix="edgeloop-measure-") as name:
        folder = Path(name)
        _write_plan(folder, [Planned(f) for f in feeds])
        if ends is not None:
            np.save(folder / "largest.npy", ends)
        if end := _wait(["measure", str(model.resolve()), name], timeout_s, None):
            raise EngineError("ONNX Runtime cannot run the model to calibrate it", engine_said=end)
        measured: npt.NDArray[np.float64] = np.load(folder / "measured.npy")
        return measured


def _write_plan(folder: Path, plan: Sequence[Planned]) -> None:
    files: dict[int, str] = {}
    entries = []
    for run in plan:
        file = files.setdefault(id(run.feeds), f"feeds-{len(files)}.npz")
        if not (folder / file).exists():
            arrays = {str(i): value for i, value in enumerate(run.feeds.values())}
            np.savez(folder / file, **arrays)  # type: ignore[arg-type]  # numpy types savez's **kwds as bool
        entries.append({"feeds": file, "names": list(run.feeds), "fresh": run.fresh})
    (folder / "plan.json").write_text(json.dumps(entries), encoding="utf-8")


def _wait(arguments: Sequence[str], timeout_s: float, malloc_fill: int | None) -> str:
    """Run the child to its end; "" or how it failed."""
    argv = [sys.executable, "-P", "-m", "tasks.mnn.onnx_child", *arguments]
    env = {"OMP_NUM_THREADS": "1"}
    if malloc_fill is not None:
        env["MALLOC_PERTURB_"] = str(malloc_fill)
    ended = run_child(argv, env=env, timeout_s=timeout_s)
    if not ended.failure.startswith("exited"):
        return ended.failure
    said = ended.said.strip().splitlines()
    return f"failed: {said[-1]}" if said else ended.failure


def _read(folder: Path, index: int, end: str) -> Done:
    record, error = folder / f"out-{index}.json", folder / f"error-{index}.txt"
    if record.exists():
        names = json.loads(record.read_text(encoding="utf-8"))
        with np.load(folder / f"out-{index}.npz", allow_pickle=False) as file:
            outputs = {name: file[str(i)] for i, name in enumerate(names)}
        return Done(outputs=outputs)
    if error.exists():
        return Done(outputs=None, error=error.read_text(encoding="utf-8").strip())
    return Done(outputs=None, error=end or "was not reached")
