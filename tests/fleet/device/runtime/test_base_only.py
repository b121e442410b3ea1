"""The runtime needs the base dependencies of pyproject.toml and nothing else."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

from release_rig import LABELS, PHONE, Rig

ROOT = Path(__file__).resolve().parents[4]
_THEIR_OWN = {"_cffi_backend", "cffi", "urllib3", "_mnncengine", "cv2", "MNN", "_distutils_hack"}
"""Modules of what the base dependencies themselves depend on, and names that are not the package's."""

_CODE = """
import sys
allowed = {allowed!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{{name}} is not of the base")
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {root!r})
from pathlib import Path
import numpy as np
from fleet.device.runtime import DeviceInfo, Runtime
try:
    import onnx
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the guard lets everything through")
anchor = Path({anchor!r}).read_bytes()
device = DeviceInfo(**{device!r})
with Runtime(Path({home!r}), device, root=anchor) as runtime:
    runtime.update({url!r})
    answer = runtime.predict(np.full((20, 30, 3), 90, np.uint8))
    print(answer.label, answer.release)
"""


def test_a_signed_release_end_to_end_on_the_base_alone(rig: Rig):
    """Download, verify, self-test and answer in a process that can import nothing but the base."""
    rig.publish(1)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.split(r"[<>=]", line)[0].strip() for line in project["dependencies"]}
    assert base == {"MNN", "cryptography", "numpy", "opencv-python-headless", "tuf"}
    allowed = {*sys.stdlib_module_names, *base, *_THEIR_OWN, "fleet", "securesystemslib", "__main__"}
    code = textwrap.dedent(_CODE).format(
        allowed=allowed,
        root=str(ROOT),
        anchor=str(rig.folder / "repository/metadata/1.root.json"),
        device={name: getattr(PHONE, name) for name in PHONE.__dataclass_fields__},
        home=str(rig.home),
        url=rig.server.url,
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=clean, cwd=rig.folder
    )
    assert done.returncode == 0, done.stderr
    label, counter = done.stdout.split()
    assert label in LABELS
    assert counter == "1"
