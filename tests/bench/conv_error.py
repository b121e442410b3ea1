"""How far single float convolutions in MNN are from ONNX Runtime, by kernel, stride, dilation and groups.

    python tests/bench/conv_error.py

What `tasks.mnn.onnx_parity` allows a convolution comes from here.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from report import FOLDER, conditions, parser, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks" / "mnn"))
from onnx_graphs import graph, node, save

from fleet.device.engine import ENGINE_VERSION, Session
from tasks.mnn.converter import convert

SEEDS = range(6)
SIZES = ((3, 16, 64), (16, 16, 64), (64, 64, 32))
"""Channels in, channels out, side in pixels."""
KINDS: tuple[tuple[tuple[int, int], dict[str, Any]], ...] = (
    *(((k, k), {}) for k in range(1, 10)),
    ((1, 7), {}),
    ((7, 1), {}),
    ((3, 5), {}),
    ((5, 5), {"strides": [2, 2]}),
    ((7, 7), {"strides": [2, 2]}),
    ((5, 5), {"dilations": [2, 2]}),
    ((5, 5), {"group": 16}),
)


def error(kernel: tuple[int, int], more: dict[str, Any], size: tuple[int, int, int], seed: int) -> float:
    """Largest difference in units of the output's range, for one random convolution and input."""
    channels, filters, side = (16, 16, size[2]) if "group" in more else size
    rng = np.random.default_rng(seed)
    fan_in = channels // more.get("group", 1)
    weight = rng.standard_normal((filters, fan_in, *kernel)) / np.sqrt(fan_in * kernel[0] * kernel[1])
    x = rng.standard_normal((1, channels, side, side)).astype(np.float32)
    conv = node("Conv", "x w", "y", kernel_shape=list(kernel), pads=[k // 2 for k in kernel * 2], **more)
    model = graph([conv], [("x", list(x.shape))], [("y", None)], {"w": weight.astype(np.float32)})
    with tempfile.TemporaryDirectory() as folder:
        path, mnn = save(model, Path(folder) / "m.onnx"), Path(folder) / "m.mnn"
        convert(path, mnn)
        (want,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
        with Session(mnn) as session:
            got = session.run({"x": x})["y"]
    return float(np.abs(got - want).max() / np.ptp(want))


def main() -> None:
    """Measure every kind and write the result."""
    parser(__doc__).parse_args()
    rows = []
    for kernel, more in KINDS:
        errors = [error(kernel, more, size, seed) for size in SIZES for seed in SEEDS]
        said = ", ".join(f"{name} {value}" for name, value in more.items())
        rows.append(
            {
                "kernel": "x".join(map(str, kernel)),
                "else": said,
                "median": f"{statistics.median(errors):.1e}",
                "most": f"{max(errors):.1e}",
                "n": len(errors),
            }
        )
    write(
        FOLDER / "conv_error.json",
        {
            "title": "How far single convolutions in MNN are from ONNX Runtime",
            "command": "python tests/bench/conv_error.py",
            "text": "float32, weights and inputs from a normal distribution; the largest difference in units"
            " of the output's range. Square kernels of 4 to 7, dense and at stride 1, are computed more"
            " roughly, for which `edgeloop convert` allows 6e-4; some of 2 are rougher yet and refused.",
            "conditions": conditions(engine=ENGINE_VERSION, sizes=str(SIZES), seeds=len(SEEDS)),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
