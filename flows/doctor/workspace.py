"""Whether the workspaces can be built.

python -m flows.doctor.workspace ROOT NAME    in a child of the doctor: importing the stages takes seconds
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import UserError
from flows.doctor.finding import Finding, guarded, hand_over
from flows.inputs import graph_problems, section_problems, source_problems, stage_names
from tasks.data.hashable import escaped
from tasks.stage import read_params
from tasks.workspace import Workspace, workspaces


def check_workspace(workspace: Workspace) -> Iterator[Finding]:
    """Graph and parameters, each section against its stage's model, and the images they point to."""
    found = _problems(workspace)
    yield from (Finding.of_error("workspace", error) for error in found)
    if found:
        return
    yield Finding(check="workspace", status="ok", found=f"{workspace.path / 'params.yaml'} fits every stage")
    missing = source_problems(workspace)
    yield from (Finding.of_error("source images", error) for error in missing)
    if not missing:
        source = workspace.path / read_params(workspace.path)["prepare"]["source"]["path"]
        yield Finding(check="source images", status="ok", found=escaped(str(source)))


def check_other_workspaces(workspace: Workspace) -> Iterator[Finding]:
    """The others of the repository; their images may lie on other machines, so nobody asks for them."""
    root = workspace.repository
    sound = []
    for other in workspaces(root).values():
        if other == workspace:
            continue
        found = _problems(other)
        yield from (Finding.of_error(f"workspace {other.name}", error) for error in found)
        sound += [] if found else [other.name]
    yield Finding(
        check="other workspaces", status="ok", found=f"{', '.join(sound) or 'none'}: fit every stage"
    )
    for folder in sorted(root.glob("workspaces/*/")):
        if not (folder / "params.yaml").exists():
            yield Finding(
                check=f"workspace {folder.name}",
                status="problem",
                found=f"{folder} has no params.yaml",
                next_step=f"`rm -r {folder}`, then `edgeloop init {folder.name} DIR`",
            )


def _problems(workspace: Workspace) -> list[UserError]:
    found = graph_problems(workspace)
    try:
        document, stages = read_params(workspace.path), stage_names(workspace)
    except UserError:
        return found
    return found + section_problems(workspace.path, [name for name in stages if name in document])


def main() -> None:
    """The child."""
    root, name = Path(sys.argv[1]), sys.argv[2]
    workspace = workspaces(root)[name]
    hand_over(
        [
            *guarded("workspace", lambda: check_workspace(workspace)),
            *guarded("other workspaces", lambda: check_other_workspaces(workspace)),
        ]
    )


if __name__ == "__main__":
    main()
