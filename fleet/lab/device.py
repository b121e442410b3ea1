"""What the lab needs of a device to measure on it; this host is one, a board or a phone is another."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol


class Device(Protocol):
    """Somewhere the programs of `fleet.device` run, one at a time.

    What they measure is theirs to say (`fleet.device.{bench,profile,identity}`): a device only carries the
    model there, starts them and brings back what they answer.
    """

    @property
    def name(self) -> str:
        """As `devices` in params.yaml and the files of reports/ have it."""

    def lock(self) -> AbstractContextManager[None]:
        """Keep every other measurement off the device, whoever asks for it; waits while there is one."""

    def run(self, program: str, options: Mapping[str, Any], *, model: Path | None = None) -> Any:
        """Run a program in a fresh process on the device and return its answer.

        Args:
            program: Dotted name of a module that `fleet.device.program.answer` makes a program.
            options: JSON-able; `model` is added, as the path that the file has on the device.
            model: A file of this host that the program needs.

        Raises:
            UserError: the program refused what it was given.
            EngineError: the process crashed or hung, or the engine failed in it.
        """
