"""This host as a device of the lab."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fleet.device.errors import EngineError
from fleet.device.program import read_answer
from fleet.lab.child import Limits, run_child
from fleet.lab.lock import exclusive, lock_path

_CODE = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600.0
_LAST_LINES = 5


class LocalDevice:
    """This host: a program is a child process, a model lies where it is."""

    name = "local"

    def lock(self) -> AbstractContextManager[None]:
        """One measurement at a time on this host, over processes and users."""
        return exclusive(lock_path(self.name), "this host")

    def run(self, program: str, options: Mapping[str, Any], *, model: Path | None = None) -> Any:
        """As `Device.run`; at most ten minutes."""
        given = dict(options) | ({"model": str(model.resolve())} if model else {})
        # -P and the path: the programs of this very code, not what a folder `fleet` around the user holds.
        command = [sys.executable, "-P", "-m", program, json.dumps(given)]
        path = os.pathsep.join(filter(None, (str(_CODE), os.environ.get("PYTHONPATH"))))
        # No limit of memory: a GPU's driver reserves more addresses than there is memory.
        limits = Limits(memory_bytes=None)
        ended = run_child(command, timeout_s=_TIMEOUT_S, env={"PYTHONPATH": path}, limits=limits)
        what = f"{program.rpartition('.')[2]} of {model.name if model else 'this host'}"
        if ended.failure:
            last = "\n".join(ended.stderr.strip().splitlines()[-_LAST_LINES:])
            raise EngineError(f"{what} {ended.failure}", engine_said=last)
        try:
            return read_answer(ended.stdout)
        except ValueError as error:
            raise EngineError(f"{what} gave no answer: {error}", engine_said=ended.said[-300:]) from error
