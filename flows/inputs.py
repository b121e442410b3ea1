"""What a build is made from, looked at before DVC starts, which says later and less clearly what is wrong.

Two steps. `check_workspace` reads files only, so each build begins with it. Whether the sections fit their
stages is known to the stages' modules, which take seconds to import: `SectionCheck` does that in a child
beside the start of Prefect, and only for stages that are due.

    python -m flows.inputs WORKSPACE STAGE...    the child; prints a JSON list of problems
"""

import difflib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from fleet.device.errors import UserError
from tasks.data.hashable import check_hashable, escaped
from tasks.stage import Params, load_params, read_params
from tasks.workspace import CODE, Workspace

_NO_STAGES = ("root", "devices")
"""Keys of params.yaml that are no stage's section."""
_DEVICES = ("local",)
"""What tasks/probe.py knows how to reach."""


def check_workspace(workspace: Workspace) -> None:
    """See that graph, parameters and images are there and lead to each other.

    Raises:
        UserError: all that is wrong, with every next step.
    """
    _raise_all([*graph_problems(workspace), *source_problems(workspace)])


def graph_problems(workspace: Workspace) -> list[UserError]:
    """What is wrong with dvc.yaml and params.yaml as far as files tell."""
    try:
        stages, document = stage_names(workspace), read_params(workspace.path)
    except UserError as error:
        return [error]
    path = workspace.path / "params.yaml"
    return [
        *_section_names(path, document, stages),
        *_root(path, document, workspace),
        *_devices(path, document),
    ]


def stage_names(workspace: Workspace) -> list[str]:
    """The stages of a workspace's dvc.yaml; each is a module of `tasks` and a section of params.yaml.

    Raises:
        UserError: there is no dvc.yaml, or it cannot be read.
    """
    path = workspace.path / "dvc.yaml"
    mend = (
        "git checkout dvc.yaml" if workspace.path == workspace.repository else f"ln -sf ../../dvc.yaml {path}"
    )
    try:
        return list(yaml.safe_load(path.read_text(encoding="utf-8"))["stages"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: {' '.join(str(error).split())}",
            allowed="the dvc.yaml of the repository's root, or a link to it",
            next_step=f"`{mend}`",
        ) from error


def _section_names(path: Path, document: dict[Any, Any], stages: Sequence[str]) -> Iterable[UserError]:
    known = (*_NO_STAGES, *stages)
    missing = [name for name in known if name not in document]
    for name in [str(name) for name in document if name not in known]:
        meant = next(iter(difflib.get_close_matches(name, missing, n=1)), None)
        yield UserError(
            f"{path} has a section `{name}` that no stage reads" + (f", but none `{meant}`" if meant else ""),
            allowed=", ".join(known),
            next_step=f"call `{name}` `{meant}`" if meant else f"remove `{name}`",
        )
        missing = [other for other in missing if other != meant]
    for name in missing:
        yield UserError(
            f"{path} has no section `{name}`",
            allowed=f"a mapping with a section for each stage, `{name}` among them",
            next_step=f"copy `{name}` from the params.yaml at the repository's root",
        )


def _root(path: Path, document: dict[Any, Any], workspace: Workspace) -> Iterable[UserError]:
    if "root" not in document:
        return
    root, right = document["root"], os.path.relpath(workspace.repository, workspace.path)
    if not isinstance(root, str) or (path.parent / root).resolve() != workspace.repository.resolve():
        yield UserError(
            f"{path}: root is {root!r}",
            allowed=f"the way from the workspace to edgeloop's code: {right}",
            next_step=f"write `root: {right}`",
        )


def _devices(path: Path, document: dict[Any, Any]) -> Iterable[UserError]:
    if "devices" not in document:
        return
    devices = document["devices"]
    names = devices if isinstance(devices, list) else []
    if not names or [name for name in names if name not in _DEVICES] or len(set(names)) < len(names):
        yield UserError(
            f"{path}: devices is {devices!r}",
            allowed=f"a list of one or more of: {', '.join(_DEVICES)} (this host)",
            next_step="write `devices: [local]`",
        )
        return
    gate = document.get("gate")
    judged = gate.get("devices", names) if isinstance(gate, dict) else names
    if not isinstance(judged, list) or sorted(map(str, judged)) != sorted(names):
        yield UserError(
            f"{path}: gate.devices is {judged!r}",
            allowed=f"the devices that are measured: {names}",
            next_step="leave gate.devices away, or write the same list",
        )


def source_problems(workspace: Workspace) -> list[UserError]:
    """What is wrong with the images; nothing when params.yaml cannot be read at all."""
    path = workspace.path / "params.yaml"
    try:
        named = read_params(workspace.path)["prepare"]["source"]["path"]
    except UserError:
        return []
    except (KeyError, TypeError):
        named = None
    if not isinstance(named, str) or not named or "\0" in named:
        return [
            UserError(
                f"{path}: prepare.source.path is {named!r}",
                allowed="the path of a folder or tar file, as seen from the workspace",
                next_step="write prepare.source as docs/own-images.md shows it",
            )
        ]
    source = workspace.path / named
    try:
        check_hashable(source)
        source.stat()
    except UserError as error:
        return [error]
    except OSError as error:
        place = escaped(os.path.normpath(source.absolute()))
        return [
            UserError(
                f"the images of workspace {workspace.name} are not at {place}: {error.strerror}",
                allowed="an existing folder or tar file",
                next_step=f"put them there, or correct prepare.source.path in {path}",
            )
        ]
    return []


def section_problems(workspace: Path, stages: Iterable[str]) -> list[UserError]:
    """What the stages' own models refuse in their sections; imports the stages, which takes seconds."""
    found = []
    for name in stages:
        model: type[Params] = getattr(importlib.import_module(f"tasks.{name}"), f"{name.capitalize()}Params")
        try:
            load_params(name, model, workspace)
        except UserError as error:
            found.append(error)
    return found


class SectionCheck:
    """`section_problems` in a child process, while the caller starts something else that is slow."""

    def __init__(self, workspace: Workspace, stages: Iterable[str], env: dict[str, str]) -> None:
        """Start the check of `stages`, named as DVC does; `env` has this code on its PYTHONPATH."""
        names = sorted({stage.partition("@")[0] for stage in stages})
        command = [sys.executable, "-m", "flows.inputs", str(workspace.path), *names]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, cwd=CODE, env=env, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no child behind."""
        self._child.kill()
        self._child.communicate()

    def require(self) -> None:
        """Wait for the answer.

        Raises:
            UserError: a section does not fit its stage, or a stage's module cannot be imported.
        """
        out, err = self._child.communicate()
        if self._child.returncode:
            raise UserError(
                f"the stages cannot be imported: {(err.strip().splitlines() or ['no message'])[-1]}",
                allowed="a Python environment as `make setup` creates it",
                next_step="`make setup`; `edgeloop doctor` looks further",
            )
        _raise_all(UserError(**record) for record in json.loads(out))


def _raise_all(found: Iterable[UserError]) -> None:
    """One error that says all of them; nothing when there is none."""
    every = list(found)
    if len(every) == 1:
        raise every[0]
    if every:
        raise UserError(
            "; ".join(error.got for error in every),
            allowed="; ".join(dict.fromkeys(error.allowed for error in every)),
            next_step="; ".join(dict.fromkeys(error.next_step for error in every)),
        )


def main() -> None:
    """The child."""
    found = section_problems(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps([{"got": p.got, "allowed": p.allowed, "next_step": p.next_step} for p in found]))


if __name__ == "__main__":
    main()
