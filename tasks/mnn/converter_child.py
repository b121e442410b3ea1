"""The only process that loads MNN's converter: a script that `tasks.mnn.converter` runs.

    python converter_child.py convert ARGUMENTS...
    python converter_child.py inspect MODEL.mnn RESULT.json

`MNN.tools` must stay out of this process: it installs packages and
uploads arguments. `_tools` is the converter itself and does neither.
"""

import json
import sys
from pathlib import Path


def _convert(arguments: list[str]) -> None:
    import _tools

    _tools.mnnconvert(["mnnconvert", *arguments])


def _inspect(model: Path, result: Path) -> None:
    """Open the model and, when every input shape is known, run it once on zeros."""
    import numpy as np

    from fleet.device.engine import Session

    with Session(model) as session:
        inputs = session.inputs
        ran = None
        if all(spec.dtype != "unknown" for spec in inputs.values()):
            _, runs = session.trace({name: np.zeros(s.shape, s.dtype) for name, s in inputs.items()})
            ran = {"ops": len(runs), "int8_ops": sum(run.int8 for run in runs)}
        seen = {
            "inputs": [vars(spec) for spec in inputs.values()],
            "outputs": [vars(spec) for spec in session.outputs.values()],
            "ran": ran,
        }
    result.write_text(json.dumps(seen), encoding="utf-8")


def main() -> None:
    """Convert or inspect."""
    mode, *arguments = sys.argv[1:]
    if mode == "convert":
        _convert(arguments)
        return
    from fleet.device.errors import EdgeloopError

    try:
        _inspect(Path(arguments[0]), Path(arguments[1]))
    except EdgeloopError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
