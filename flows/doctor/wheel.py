"""The files of an installed package, as its wheel's RECORD lists them.

Read here and not through `importlib.metadata`'s `files`: where the backport importlib_metadata is loaded,
that leaves out just the files that are missing.
"""

import csv
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One line of a RECORD."""

    name: str
    path: Path
    algorithm: str
    """Of the hash; empty where the wheel lists none, as of RECORD itself."""
    digest: str
    """URL-safe base64 without padding."""


def recorded_files(package: importlib.metadata.Distribution) -> list[Recorded] | None:
    """Every file but byte code, which is made again when it is missing; None without a RECORD."""
    text = package.read_text("RECORD")
    if text is None:
        return None
    found = []
    for name, hashed, *_ in csv.reader(text.splitlines()):
        if not name.endswith(".pyc"):
            algorithm, _, digest = hashed.partition("=")
            path = Path(str(package.locate_file(name)))
            found.append(Recorded(name=name, path=path, algorithm=algorithm, digest=digest))
    return found
