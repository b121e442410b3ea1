"""DVC's list of who reads and writes which path, `.dvc/tmp/rwlock`: by process id, so a killed one stays.

The form is that of `dvc.rwlock.SCHEMA`: `{"write": {path: who}, "read": {path: [who, ...]}}`.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(".dvc/tmp/rwlock")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process in the list."""

    pid: int
    command: str


def holders(path: Path) -> list[Holder]:
    """Every process in the list once; none when there is no list.

    Raises:
        ValueError: it has another form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    try:
        record = json.loads(text) if text.strip() else {}
        found = [*record.get("write", {}).values(), *itertools.chain(*record.get("read", {}).values())]
        who = [Holder(pid=int(one["pid"]), command=str(one["cmd"])) for one in found]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return list(dict.fromkeys(who))
