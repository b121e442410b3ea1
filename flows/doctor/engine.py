"""The engine: the wheel as it was shipped, and a model converted and run."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import EdgeloopError
from flows.doctor.finding import Finding

# The converter's own command line installs and feeds this log client; edgeloop never calls it.
_PHONE_HOME_PACKAGE = "aliyun-log-python-sdk"


def check_engine_wheel() -> Iterator[Finding]:
    """Every file of the MNN wheel against the hash its RECORD lists, and the log client it would install."""
    distribution = importlib.metadata.distribution("MNN")
    changed = []
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if file.hash is None or path.suffix == ".pyc":
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(str(file))
    yield Finding(
        check="engine wheel",
        status="problem" if changed else "ok",
        found=f"MNN {distribution.version}: "
        + (f"changed files {changed[:5]}" if changed else "all files as the wheel shipped them"),
        next_step=f"`pip install --force-reinstall --no-deps MNN=={distribution.version}`" if changed else "",
    )
    spied = importlib.util.find_spec("aliyun") is not None
    yield Finding(
        check="engine phone-home",
        status="warning" if spied else "ok",
        found=f"{_PHONE_HOME_PACKAGE} is installed: MNN's own command line was run"
        if spied
        else "its log client is not installed",
        next_step=f"`pip uninstall {_PHONE_HOME_PACKAGE}`, and convert with `edgeloop convert`"
        if spied
        else "",
    )


def check_engine_works() -> Iterator[Finding]:
    """A one-convolution model through the converter and the engine, compared with numpy's answer."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from fleet.device.engine import ENGINE_VERSION, Session
    from tasks.mnn.converter import convert

    weight = np.arange(12, dtype=np.float32).reshape(4, 3, 1, 1)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 2, 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 3, 2, 2)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "probe.onnx", Path(folder) / "probe.mnn"
        onnx.save(model, source)
        try:
            convert(source, target)
            with Session(target) as session:
                error = float(
                    np.abs(
                        session.run({"x": x})["y"] - np.einsum("oi,nihw->nohw", weight[..., 0, 0], x)
                    ).max()
                )
        except EdgeloopError as problem:
            yield Finding(
                check="engine",
                status="problem",
                found=str(problem),
                next_step="reinstall MNN with `make setup`; if it stays, report this text",
            )
            return
    good = error < 1e-4
    yield Finding(
        check="engine",
        status="ok" if good else "problem",
        found=f"MNN {ENGINE_VERSION} converts and runs, largest error {error:.1e}",
        next_step=""
        if good
        else "this build of MNN computes wrongly on this CPU: use another machine or version",
    )
