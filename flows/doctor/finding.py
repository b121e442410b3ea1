"""What the doctor says of one thing it looked at."""

from dataclasses import dataclass
from typing import Literal, Self

from fleet.device.errors import UserError

Status = Literal["ok", "warning", "problem"]


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
