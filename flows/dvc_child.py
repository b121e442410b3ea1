"""The child in which DVC runs one stage: `python -m flows.dvc_child STAGE`, in the workspace.

DVC's own command line ends with 255 whatever went wrong. Here the reason is at hand, so it is written, as an
error for people, to the file EDGELOOP_FAILURE_FILE names, unless the stage has written there what it knows.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from fleet.device.errors import INTERRUPTED, EdgeloopError, EngineError, UserError
from tasks.provenance import inputs_in
from tasks.stage import FAILURE_FILE, write_json
from tasks.tracking import INPUTS
from tasks.workspace import causes, disk_full, workspace_name


def main() -> None:
    """Bring one stage up to date; DVC prints what it does on stdout."""
    from dvc.repo import Repo

    stage = sys.argv[1]
    try:
        with Repo(_wait_for_lock=True) as repo:
            os.environ[INPUTS] = inputs_in(repo, Path.cwd(), stage).tags()  # DVC passes it on to the stage
            repo.reproduce(stage, single_item=True)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # whatever DVC raises becomes an error for people
        _fail(explain(error))


def explain(error: BaseException) -> EdgeloopError:
    """What DVC raised, as got, allowed and next step where the cause is known."""
    from dvc.dependency.base import DependencyDoesNotExistError
    from dvc.dependency.param import BadParamFileError, MissingParamsError
    from dvc.lock import LockError
    from dvc.stage.exceptions import MissingDataSource, StageCmdFailedError
    from dvc.utils.serialize import YAMLFileCorruptedError

    if full := disk_full(error, Path()):
        return full
    text = innermost(error)
    for cause in causes(error):
        if isinstance(cause, LockError):
            return locked(workspace_name(Path.cwd()), text)
        if isinstance(cause, StageCmdFailedError):
            return _ended(str(cause))
        if isinstance(cause, MissingDataSource | DependencyDoesNotExistError | FileNotFoundError):
            return UserError(
                text,
                allowed="a file or folder for each path that dvc.yaml and params.yaml name",
                next_step="put it there, or correct `root` or prepare.source.path in params.yaml; "
                "`git checkout` brings a lost file of edgeloop back",
            )
        if isinstance(cause, PermissionError):
            return UserError(
                text, allowed="files that this user may read and write", next_step="`chmod` or `chown` it"
            )
        if isinstance(cause, UnicodeError):
            return UserError(
                f"DVC met a name that is not UTF-8: {text}",
                allowed="file names in UTF-8",
                next_step="rename the file; `edgeloop doctor` looks for it",
            )
        if isinstance(cause, MissingParamsError | BadParamFileError | YAMLFileCorruptedError):
            return UserError(
                text,
                allowed="a params.yaml with a section for each stage",
                next_step="compare it with the params.yaml at the repository's root",
            )
    return EngineError(f"DVC could not run it: {text}")


def locked(workspace: str, said: str) -> UserError:
    """Another process of DVC holds what this one needs."""
    return UserError(
        f"another DVC process works on workspace {workspace}: {said}",
        allowed="one build of a workspace at a time",
        next_step="wait until it has ended, or end it by the process id named; then build again",
    )


def innermost(error: BaseException) -> str:
    """What DVC says in one line, with its cause; `failed to reproduce` alone says nothing."""
    from dvc.exceptions import ReproductionError  # a wrapper around whatever went wrong

    chain = [link for link in causes(error) if not isinstance(link, ReproductionError)]
    told = [str(link) or type(link).__name__ for link in chain]
    lines = dict.fromkeys(
        " ".join(text.encode("utf-8", "backslashreplace").decode().split()) for text in told
    )
    return ": ".join(line for line in lines if not any(line != other and line in other for other in lines))


def _ended(said: str) -> EdgeloopError:
    """A stage that could not say itself why it ended."""
    status = said.rpartition("exited with ")[2]
    if status.removeprefix("-") in ("9", "137"):
        return EngineError(f"{said}: killed from outside, most often because memory ran out")
    if status == "127":
        return UserError(
            said,
            allowed="a Python environment with a command `python`, as `make setup` creates it",
            next_step="`make setup`, then `.venv/bin/edgeloop build`",
        )
    return EngineError(f"{said}; what it printed stands above")


def _fail(error: EdgeloopError) -> NoReturn:
    """End with the error's exit code and leave word of it: the build prints it, once."""
    file = Path(os.environ[FAILURE_FILE]) if FAILURE_FILE in os.environ else None
    if file is None:
        print(f"ERROR: {error}", file=sys.stderr)
    elif not file.exists():
        write_json(file, {"exit_code": error.exit_code, "error": str(error)})
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
