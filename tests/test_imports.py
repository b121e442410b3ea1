"""Which way imports go, and how heavy the command line is before it has work."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from project_imports import ROOT, imported_names

MODULES = sorted(path for package in ("fleet", "tasks", "flows") for path in (ROOT / package).rglob("*.py"))
HEAVY = (
    "torch",
    "torchvision",
    "mlflow",
    "prefect",
    "great_expectations",
    "altair",
    "dvc",
    "pandas",
    "sklearn",
    "MNN",
)


def _imports(path: Path) -> set[str]:
    return imported_names(ast.parse(path.read_text(encoding="utf-8")))


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=_ids)
def test_imports_go_one_way(path):
    """flows -> tasks -> fleet.lab -> fleet.device, and flows -> fleet.gateway -> fleet.device: never back."""
    above = {
        "fleet/device": ("fleet.lab", "fleet.gateway", "fleet.simulator", "tasks", "flows"),
        "fleet/gateway": ("fleet.lab", "fleet.simulator", "tasks", "flows"),
        "fleet/simulator": ("fleet.lab", "fleet.gateway", "tasks", "flows"),
        "fleet/lab": ("tasks", "flows"),
        "tasks": ("flows",),
    }
    place = next((folder for folder in above if path.is_relative_to(ROOT / folder)), None)
    forbidden = above.get(place, ())
    wrong = {
        name
        for name in _imports(path)
        if name.startswith(tuple(f"{f}." for f in forbidden)) or name in forbidden
    }
    assert not wrong


@pytest.mark.parametrize("path", sorted((ROOT / "fleet" / "device").rglob("*.py")), ids=_ids)
def test_the_device_side_needs_the_base_dependencies_only(path):
    """What runs on a device imports numpy, OpenCV, MNN, python-tuf, cryptography, the stdlib and itself."""
    base = {"numpy", "cv2", "MNN", "tuf", "securesystemslib", "cryptography"}
    allowed = {*sys.stdlib_module_names, *base, "fleet"}
    assert {name.split(".")[0] for name in _imports(path)} <= allowed


@pytest.mark.parametrize(
    "path", [path for path in MODULES if not path.is_relative_to(ROOT / "flows")], ids=_ids
)
def test_only_flows_imports_prefect(path):
    """Tasks are plain functions: they run without Prefect."""
    assert not any(name.split(".")[0] == "prefect" for name in _imports(path))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["build", "--help"]], ids=" ".join)
def test_the_command_line_is_light(arguments):
    """Asking `edgeloop` for help imports none of the libraries that take seconds."""
    code = (
        "import sys\nfrom flows.cli import main\n"
        f"try: main({arguments!r})\n"
        f"finally: print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout


def test_a_stage_does_not_import_mlflow():
    """Tracking is handed to a child: the stage frame itself never waits for MLflow's import."""
    code = "import sys, tasks.stage; assert 'mlflow' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
