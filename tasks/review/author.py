"""Who decides, and how that was found out. A name is what somebody says: nothing here proves it."""

import getpass
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fleet.device.errors import UserError

TEXT_LIMIT = 4000


@dataclass(frozen=True, kw_only=True)
class Author:
    """A person, or what stands for one."""

    name: str
    source: str


THROUGH_MLFLOW = Author(name="unknown, through MLflow", source="MLflow, which does not say who edits")


def author(folder: Path, given: str | None) -> Author:
    """The one named on the command line, else git's user in `folder`, else the system's.

    Raises:
        UserError: the name given cannot be written down.
    """
    if given is not None:
        return Author(name=checked_text("--by", given), source="--by")
    name, mail = (_git(folder, key) for key in ("user.name", "user.email"))
    if name:
        return Author(name=f"{name} <{mail}>" if mail else name, source="git config")
    try:
        return Author(name=getpass.getuser(), source="operating system")
    except (OSError, KeyError):  # KeyError before Python 3.13: a user id without a name
        return Author(name="unknown", source="neither git nor the operating system has a name")


def through_mlflow(reviewed_by: str | None) -> Author:
    """The author of an edit in MLflow: who the tag `reviewed_by` names."""
    name = (reviewed_by or "").strip()
    return Author(name=name, source="MLflow tag reviewed_by") if name else THROUGH_MLFLOW


def checked_text(what: str, text: str) -> str:
    """A name or reason that ledger and MLflow can keep.

    Raises:
        UserError: it is empty, too long, or no text.
    """
    stripped = text.strip()
    encodable = stripped.encode("utf-8", "replace").decode("utf-8") == stripped
    printable = all(letter.isprintable() or letter in "\n\t" for letter in stripped)
    if not stripped or len(stripped) > TEXT_LIMIT or not encodable or not printable:
        raise UserError(
            f"{what} is {stripped[:60]!r}",
            allowed=f"1 to {TEXT_LIMIT} printable characters",
            next_step=f'say it in words: {what} "..."',
        )
    return stripped


def _git(folder: Path, key: str) -> str:
    command = ["git", "-C", str(folder), "config", "--get", key]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()
