"""ONNX Runtime or MNN on a user's graph, in a process of its own: a side of a parity run, or calibration.

Both engines can crash or hang on a graph they do not understand, so neither runs in the caller's process.

Usage: python -m tasks.mnn.onnx_child reference|optimized|engine MODEL FOLDER
       python -m tasks.mnn.onnx_child bisect MODEL.mnn FOLDER MODEL.onnx TOLERANCE
       python -m tasks.mnn.onnx_child fold|measure MODEL FOLDER

FOLDER holds `plan.json`, a list of runs; run i is {"feeds": name of an npz, "names": input names in its
order, "fresh": whether a new session starts with this run}. Run i's outputs go to `out-i.npz` with their
names in `out-i.json`, or its error to `error-i.txt`; an error ends the engine's work and skips a run of the
reference. What `bisect`, `fold` and `measure` write into FOLDER is said at their functions.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.device.errors import EdgeloopError

Array = npt.NDArray[Any]

_BINS = 2048  # of a histogram


def load_feeds(folder: Path, run: dict[str, Any]) -> dict[str, Array]:
    """The inputs of one run by tensor name; the file numbers them, because names are arbitrary text."""
    with np.load(folder / run["feeds"], allow_pickle=False) as file:
        return {name: file[str(index)] for index, name in enumerate(run["names"])}


def save_outputs(folder: Path, index: int, outputs: dict[str, Array]) -> None:
    """Write one run's outputs; the JSON comes last, so that its presence means the run is complete."""
    np.savez(folder / f"out-{index}.npz", **{str(i): v for i, v in enumerate(outputs.values())})  # type: ignore[arg-type]  # numpy types savez's **kwds as bool
    (folder / f"out-{index}.json").write_text(json.dumps(list(outputs)), encoding="utf-8")


def reference(model: Path, folder: Path, plan: list[dict[str, Any]], *, optimized: bool) -> None:
    """Run every entry of the plan in ONNX Runtime; a run that fails is recorded and the next one is tried."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    for index, run in enumerate(plan):
        try:
            values = session.run(names, load_feeds(folder, run))
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors share no narrower base
            (folder / f"error-{index}.txt").write_text(str(error), encoding="utf-8")
            continue
        save_outputs(folder, index, dict(zip(names, map(np.asarray, values), strict=True)))


def fold(model: Path, folder: Path) -> None:
    """Write the model as folded.onnx, with its batch norms in the convolutions."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "folded.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def measure(model: Path, folder: Path, plan: list[dict[str, Any]]) -> None:
    """Write the largest |value| of each output over all runs or, with largest.npy, histograms up to it."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    given = folder / "largest.npy"
    ends = np.load(given) if given.exists() else None
    found = []
    for run in plan:
        values = [np.abs(value) for value in session.run(None, load_feeds(folder, run))]
        if ends is None:
            found.append([value.max() for value in values])
        else:
            pairs = zip(values, ends, strict=True)
            found.append([np.histogram(v, bins=_BINS, range=(0, float(end)))[0] for v, end in pairs])
    together = np.max(found, axis=0) if ends is None else np.sum(found, axis=0)
    np.save(folder / "measured.npy", together.astype(np.float64))


def engine(model: Path, folder: Path, plan: list[dict[str, Any]]) -> None:
    """Run every entry of the plan in MNN."""
    from fleet.device.engine import Session

    session: Session | None = None
    for index, run in enumerate(plan):
        feeds = load_feeds(folder, run)
        try:
            if session is None or run["fresh"]:
                if session is not None:
                    session.close()
                session = Session(model, shapes={name: value.shape for name, value in feeds.items()})
            outputs = session.run(feeds)
        except EdgeloopError as error:
            (folder / f"error-{index}.txt").write_text(str(error), encoding="utf-8")
            return
        save_outputs(folder, index, outputs)


def bisect(model: Path, folder: Path, plan: list[dict[str, Any]], onnx_path: Path, tolerance: float) -> None:
    """Write the first diverging layer for the plan's only run to bisect.json, if there is one."""
    from tasks.mnn.bisect import first_divergence

    found = first_divergence(onnx_path, model, load_feeds(folder, plan[0]), tolerance=tolerance)
    if found is not None:
        record = {"op": found.layer.op_type, "node": found.layer.name, "text": str(found)}
        (folder / "bisect.json").write_text(json.dumps(record), encoding="utf-8")


def main() -> None:
    """Dispatch; see the module's docstring."""
    side, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    if side == "bisect":
        bisect(model, folder, plan, Path(sys.argv[4]), float(sys.argv[5]))
    elif side == "engine":
        engine(model, folder, plan)
    elif side == "fold":
        fold(model, folder)
    elif side == "measure":
        measure(model, folder, plan)
    else:
        reference(model, folder, plan, optimized=side == "optimized")


if __name__ == "__main__":
    main()
