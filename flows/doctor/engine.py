"""The engine: the wheel as it was shipped, a model converted and run, and nothing that reports home.

python -m flows.doctor.engine    the part that imports the engine, in a child of the doctor
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import EdgeloopError
from flows.doctor.finding import REINSTALL, Finding, exists, guarded, hand_over
from flows.doctor.wheel import Recorded, recorded_files

_ENGINE = "MNN"
_LOG_CLIENT = "aliyun-log-python-sdk"
_LOG_MODULE = "aliyun"
"""What the wheel's own programs install with whatever `pip` is on PATH, and report home with."""
_PROGRAMS = ("mnn", "mnnconvert", "mnnquant")
_TOOLS = "MNN.tools"
"""The modules behind these programs; importing them is enough."""


def check_engine_wheel() -> Iterator[Finding]:
    """Every file of the MNN wheel against the hash its RECORD lists."""
    try:
        distribution = importlib.metadata.distribution(_ENGINE)
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            check="engine wheel", status="problem", found="MNN is not installed", next_step=REINSTALL
        )
        return
    files = [file for file in recorded_files(distribution) or [] if file.digest]
    wrong = [file.name for file in files if not _as_shipped(file)]
    version = distribution.read_text("METADATA") and distribution.metadata["Version"]
    again = f"`{sys.executable} -m pip install --force-reinstall --no-deps MNN=={version or '<the pinned>'}`"
    if not files or not version:
        yield Finding(
            check="engine wheel",
            status="problem",
            found="MNN is half installed: no RECORD of its files",
            next_step=REINSTALL,
        )
        return
    yield Finding(
        check="engine wheel",
        status="problem" if wrong else "ok",
        found=f"MNN {version}: "
        + (
            f"{len(wrong)} of {len(files)} files missing or changed: {', '.join(wrong[:5])}"
            if wrong
            else f"all {len(files)} files as the wheel shipped them"
        ),
        next_step=again if wrong else "",
    )


def _as_shipped(file: Recorded) -> bool:
    if not exists(file.path):
        return False
    with file.path.open("rb") as opened:
        digest = hashlib.file_digest(opened, file.algorithm).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.digest


def check_phone_home() -> Iterator[Finding]:
    """Whether the wheel's own programs can report home, or have prepared to."""
    installed = importlib.util.find_spec(_LOG_MODULE) is not None
    elsewhere = [] if installed else _other_log_clients()
    on_path = [name for name in _PROGRAMS if shutil.which(name)]
    if installed:
        found = f"{_LOG_CLIENT} is installed here: MNN's own command line was run and can report home"
        step = f"`{sys.executable} -m pip uninstall {_LOG_CLIENT}`, and convert with `edgeloop convert`"
    elif elsewhere:
        found = f"{_LOG_CLIENT} lies in {elsewhere[0]}: MNN's own command line installed it there"
        step = f"uninstall {_LOG_CLIENT} from that Python, and convert with `edgeloop convert`"
    else:
        found, step = f"no {_LOG_CLIENT}: MNN's logger cannot run", ""
    yield Finding(check="engine phone-home", status="warning" if step else "ok", found=found, next_step=step)
    if on_path:
        yield Finding(
            check="engine programs",
            status="ok",
            found=f"{', '.join(on_path)} of the wheel are on PATH and not used: run by hand they install"
            f" {_LOG_CLIENT} with {shutil.which('pip') or 'no pip'} and report home",
        )


def _other_log_clients() -> list[Path]:
    """Log clients in the environments of every `pip` on PATH, which is what installs them."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    prefixes = {folder.resolve().parent for folder in folders if exists(folder / "pip")}
    if Path("/usr") in prefixes:
        prefixes.add(Path("/usr/local"))
    inside = ("lib", "versions/*/lib")  # the second is pyenv's, whose programs are shims
    own = Path(sysconfig.get_paths()["purelib"]).resolve()
    found = [
        client
        for prefix in sorted(prefixes)
        for lib in inside
        for client in prefix.glob(f"{lib}/python3*/*-packages/{_LOG_MODULE}")
    ]
    return [client for client in found if client.parent.resolve() != own]


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
                next_step=f"{REINSTALL}; if it stays, report this text",
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
    importlib.import_module("_tools")  # the converter, which `convert` loads in a child of its own
    loaded = sorted(name for name in sys.modules if name.startswith((_TOOLS, _LOG_MODULE)))
    yield Finding(
        check="engine logger",
        status="problem" if loaded else "ok",
        found=f"converting loaded {', '.join(loaded)}"
        if loaded
        else "converting and running load none of it",
        next_step=f"{REINSTALL}; the wheel's start-up must have been changed" if loaded else "",
    )


if __name__ == "__main__":
    hand_over(guarded("engine", check_engine_works))
