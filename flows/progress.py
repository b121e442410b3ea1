"""What a build says while a stage runs: which of how many, what it does, how long and how far it is.

On a terminal a stage draws a bar of its own. In a log, where it cannot, and on a terminal while there is no
bar, a line comes every few seconds.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasks.progress import PROGRESS_FILE, ticking

EVERY_S = 10.0

_DOES = {
    "prepare": "decode, check and split the images",
    "validate": "hold the dataset against its rules",
    "train": "train the float model",
    "prune": "cut channels and fine-tune what is left",
    "quantize": "fine-tune for int8",
    "export": "write every variant as ONNX",
    "convert": "convert to MNN and audit the graphs",
    "parity": "compare the engine's predictions with torch's",
    "probe": "ask which device this is",
    "benchmark": "measure latency and memory",
    "gate": "judge",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One stage among those that may have to run."""

    stage: str
    number: int
    """From 1."""
    count: int

    @property
    def percent_before(self) -> float:
        """How much of the build is done when it begins, counted in stages."""
        return round(100 * (self.number - 1) / self.count, 1)

    def __str__(self) -> str:
        """For people: `[3/11] train`."""
        return f"[{self.number}/{self.count}] {self.stage}"


Tell = Callable[[Step, str], None]
"""Passes on how far a step is, in words."""


@contextmanager
def told(step: Step, tell: Tell) -> Iterator[Mapping[str, str]]:
    """Say that a stage begins, and how it goes on, for the block.

    Yields:
        What the stage's environment must have.
    """
    does = _DOES.get(step.stage.partition("@")[0], "")
    _print(f"{step}: {does}" if does else str(step))
    tell(step, does)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "progress.json"
        with ticking(EVERY_S, lambda seconds: _beat(step, file, tell, seconds)):
            yield {PROGRESS_FILE: str(file)}


def _beat(step: Step, file: Path, tell: Tell, seconds: float) -> None:
    loop = _read(file)
    text = f"{seconds:.0f} s, {loop}" if loop else f"{seconds:.0f} s"
    if not (loop and sys.stderr.isatty()):  # there the stage shows it itself
        _print(f"{step}: {text}")
    tell(step, text)


def _read(file: Path) -> str:
    """How far the loop is that the stage works through, in words; empty between loops."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return f"{known['what']}, {known['done']}/{known['total']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
