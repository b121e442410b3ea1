"""The build graph: what each stage depends on, one graph for all workspaces, versions pinned once."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from project_imports import PACKAGES, ROOT, direct_reads, module_file, reads

from tasks.stage import load_params
from tasks.workspace import workspaces

GRAPH = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
WORKSPACES = workspaces(ROOT)
PRESETS = sorted(path.parent.name for path in (ROOT / "presets").glob("*/params.yaml"))


def _code_deps(stage: str) -> set[str]:
    prefix = "${root}/"
    named = {dep.removeprefix(prefix) for dep in GRAPH[stage]["deps"] if dep.startswith(prefix)}
    return {dep for dep in named if dep.split("/")[0] in PACKAGES}


@pytest.mark.parametrize("stage", GRAPH)
def test_deps_are_the_modules_a_stage_reads(stage):
    """dvc.yaml names exactly the project modules a stage imports or starts: none forgotten, none too many."""
    wanted, named = reads(f"tasks.{stage}"), _code_deps(stage)
    assert not wanted - named, f"missing in dvc.yaml, stage {stage}: {sorted(wanted - named)}"
    assert not named - wanted, f"superfluous in dvc.yaml, stage {stage}: {sorted(named - wanted)}"


def test_an_edit_of_the_gate_retrains_nothing():
    """No stage before the gate depends on the gate's modules or on the champion."""
    own = re.compile(r"tasks/(gate|champion|judge/\w+)\.py")
    assert [stage for stage in GRAPH if any(map(own.fullmatch, _code_deps(stage)))] == ["gate"]
    assert [stage for stage in GRAPH if "champion" in GRAPH[stage]["deps"]] == ["gate"]


def test_how_a_benchmark_is_judged_retrains_nothing():
    """Pruning measures its ladder, but statistics, flags and profiles are the benchmark's and the gate's."""
    names = ("lab/flags", "lab/layers", "lab/measurement", "lab/statistics", "lab/validity", "device/profile")
    judging = {f"fleet/{name}.py" for name in names}
    assert {stage for stage in GRAPH if judging & _code_deps(stage)} == {"benchmark", "gate"}


def test_excluded_modules_are_in_no_stage():
    """The stage frame, tracking, progress and errors are dependencies of no stage."""
    frame = {"tasks/stage.py", "tasks/tracking.py", "tasks/progress.py", "fleet/device/errors.py"}
    assert not any(frame & _code_deps(stage) for stage in GRAPH)


def test_the_walk_follows_functions_and_child_processes():
    """Imports inside functions and modules started by name count as read."""
    assert module_file("tasks.data.dataset") in direct_reads(ROOT / "tasks" / "train.py")
    assert module_file("tasks.mnn.converter_child") in direct_reads(ROOT / "tasks" / "mnn" / "converter.py")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_the_same_graph(preset):
    """presets/NAME/dvc.yaml is a link to the root's, so it cannot drift; its params lead back to the root."""
    folder = ROOT / "presets" / preset
    assert (folder / "dvc.yaml").readlink() == Path("../../dvc.yaml")
    params = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    assert (folder / params["root"]).resolve() == ROOT
    assert set(params) == set(yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("stage", GRAPH)
def test_params_fit_the_stages(workspace, stage):
    """Every section of every workspace is accepted by its stage: a misspelt key does not wait for hours."""
    module = importlib.import_module(f"tasks.{stage}")
    model = next(
        value
        for name, value in vars(module).items()
        if name.lower() == f"{stage}params" and isinstance(value, type)
    )
    assert load_params(stage, model, WORKSPACES[workspace].path)


def test_stages_run_by_module_and_depend_on_their_own_section():
    """The command is `python -m tasks.STAGE`, the params are the stage's own section."""
    for stage, entry in GRAPH.items():
        assert re.fullmatch(rf"python -m tasks\.{stage}( \$\{{item\.device\}})?", entry["cmd"])
        assert entry["params"] == [stage]


def test_what_git_ignores_is_kept_in_dvc():
    """Outs that git keeps are not cached by DVC; all others are, and models and data are among them."""
    for entry in GRAPH.values():
        outs = [out for kind in ("outs", "metrics", "plots") for out in entry.get(kind, ())]
        for out in outs:
            path, cached = (
                (out, True) if isinstance(out, str) else (next(iter(out)), next(iter(out.values()))["cache"])
            )
            path = path.replace("${item.device}", "local")
            ignored = subprocess.run(["git", "check-ignore", "--quiet", path], cwd=ROOT, check=False)
            assert (ignored.returncode == 0) is cached, path
            assert cached or path.startswith("reports/"), path


def test_stage_mains_are_short():
    """A stage's main() wires; it is at most 15 lines."""
    for stage in GRAPH:
        tree = ast.parse((ROOT / "tasks" / f"{stage}.py").read_text(encoding="utf-8"))
        main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
        assert main.end_lineno - main.lineno < 15, stage


def test_pins_are_those_of_the_distribution():
    """What infra/pins makes stages depend on is what `make setup` installs."""
    locked = set((ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines())
    for file in (ROOT / "infra" / "pins").iterdir():
        assert set(file.read_text(encoding="utf-8").split()) <= locked, file


def test_what_computes_with_a_library_depends_on_its_version():
    """A stage that imports what infra/pins pins, itself or through a project module, names the pin."""
    for library, pin in (("MNN", "engine"), ("torch", "training"), ("cv2|PIL", "images"), ("onnx", "onnx")):
        for stage in GRAPH:
            texts = [(ROOT / file).read_text(encoding="utf-8") for file in reads(f"tasks.{stage}")]
            uses = any(re.search(rf"^\s*(import|from) ({library})\b", text, re.MULTILINE) for text in texts)
            assert (f"${{root}}/infra/pins/{pin}.txt" in GRAPH[stage]["deps"]) is uses, (stage, library)


def test_packages_hold_no_code():
    """Importing a package a stage reads changes no result: its __init__.py needs to be nobody's dependency.

    How OpenMP's threads wait is the one thing set there: it has to be said before torch is imported.
    """
    harmless = re.compile(r"import os|os\.environ\.setdefault\('G?OMP_\w+', '\w+'\)|'.*'|\".*\"", re.DOTALL)
    read = {ROOT / file for stage in GRAPH for file in reads(f"tasks.{stage}")}
    for package in PACKAGES:
        for init in (ROOT / package).rglob("__init__.py"):
            if not any(file.is_relative_to(init.parent) for file in read):
                continue
            body = ast.parse(init.read_text(encoding="utf-8")).body
            assert all(harmless.fullmatch(ast.unparse(node)) for node in body), init


def test_digits_module_stands_for_the_digits():
    """The workspaces on the embedded set name the module that reads it as their source."""
    for name in ("digits", "tiny"):
        params = yaml.safe_load((WORKSPACES[name].path / "params.yaml").read_text(encoding="utf-8"))
        source = WORKSPACES[name].path / params["prepare"]["source"]["path"]
        assert source.resolve() == Path(module_file("tasks.data.digits"))
