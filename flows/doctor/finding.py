"""What the doctor says of one thing it looked at. Needs nothing but Python: the rest may be broken."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from fleet.device.errors import EdgeloopError, EngineError, UserError
from fleet.lab.child import Limits, run_child
from tasks.workspace import CODE

Status = Literal["ok", "warning", "problem"]

REINSTALL = "`make clean && make setup` makes the environment anew; models and data stay"
_LAST_LINES = 3
_MARK = "findings: "


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    check: str
    status: Status
    found: str
    next_step: str = ""
    """How to mend it; empty when there is nothing to mend, and only then."""

    def __post_init__(self) -> None:
        """Nobody is left with a problem and no way on."""
        assert bool(self.next_step) is (self.status != "ok"), self

    @classmethod
    def of_error(cls, check: str, error: UserError) -> Self:
        """What a build would refuse."""
        return cls(
            check=check,
            status="problem",
            found=f"{error.got}; allowed: {error.allowed}",
            next_step=error.next_step,
        )


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check; that it broke is one itself, and what it had found before stays."""
    found: list[Finding] = []
    try:
        for finding in check():
            found.append(finding)  # noqa: PERF402  # a comprehension would lose them when the check breaks
    except UserError as error:
        found.append(Finding.of_error(name, error))
    except Exception as error:  # noqa: BLE001  # anything may break in a broken set-up; it is shown, not hidden
        text = error.reason if isinstance(error, EngineError) else str(error)
        kind = "" if isinstance(error, EdgeloopError) else f"{type(error).__name__}: "
        found.append(Finding(check=name, status="problem", found=f"{kind}{text}", next_step=REINSTALL))
    return found


def in_child(name: str, module: str, *arguments: str, timeout_s: float) -> list[Finding]:
    """The findings of `python -m MODULE`, which may crash, hang, or fail to import what it needs."""
    ended = run_child(
        [sys.executable, "-m", module, *arguments],
        timeout_s=timeout_s,
        cwd=CODE,
        limits=Limits(memory_bytes=None),
    )
    # Not simply the last line: native code may have left words that come out at the exit.
    told = next((line for line in reversed(ended.stdout.splitlines()) if line.startswith(_MARK)), None)
    if ended.failure or told is None:
        last = " ".join(ended.stderr.strip().splitlines()[-_LAST_LINES:]) or "it said nothing"
        how = ended.failure or "ended without a word of what it found"
        return [Finding(check=name, status="problem", found=f"the check {how}: {last}", next_step=REINSTALL)]
    return [Finding(**record) for record in json.loads(told.removeprefix(_MARK))]


def hand_over(findings: Iterable[Finding]) -> None:
    """What such a child prints."""
    print(f"\n{_MARK}{json.dumps([asdict(finding) for finding in findings])}", flush=True)


def exists(path: Path) -> bool:
    """Whether it is there and may be looked at."""
    try:
        return path.exists()
    except OSError:
        return False
