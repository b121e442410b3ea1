"""The only process that loads MNN's own quantisation tool: a script that `tasks.mnn.ptq_tool` runs.

    python ptq_child.py MODEL.onnx FLOAT.mnn INT8.mnn CONFIG.json RESULT.json

`MNN.tools` must stay out of this process: it installs packages and uploads arguments. `_tools` is the tool
itself and does neither. It takes its arguments as one list (the wheel's own wrapper passes three, on which
MNN 3.6.1 dies).
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Convert, quantise, and run the result once on zeros."""
    onnx, floating, int8, config, result = sys.argv[1:]
    import _tools

    options = ["--bizCode", "edgeloop"]
    if json.loads(Path(config).read_text(encoding="utf-8"))["feature_quantize_method"] == "ADMM":
        # ADMM writes past the end of an input of three planes (`malloc(): corrupted top size`); a packed
        # input, which is what this option gives, has four.
        options.append("--keepInputFormat=0")
    _tools.mnnconvert(["mnnconvert", "-f", "ONNX", "--modelFile", onnx, "--MNNModel", floating, *options])
    _tools.mnnquant(["mnnquant", floating, int8, config])
    if not Path(int8).is_file():
        sys.exit("the tool wrote no file")

    import numpy as np

    from fleet.device.engine import Session

    with Session(Path(int8)) as session:
        _, ops = session.trace({name: np.zeros(s.shape, s.dtype) for name, s in session.inputs.items()})
    seen = {"ops": len(ops), "int8_ops": sum(op.int8 for op in ops)}
    Path(result).write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
