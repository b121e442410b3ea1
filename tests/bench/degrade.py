"""What skipping frames saves: inferences and CPU time of a stream, by frame rate and by what is in between.

    G=presets/grocery/models/mnn
    python tests/bench/degrade.py models/mnn/mbv3s-p30-i8-r48 $G/mbv3s-p30-i8-r160 $G/mbv3s-p0-fp32-r160

The stream is made up (a picture that moves over a 640x480 frame, 30 Hz) and played on a clock of its own, so
that nothing waits: what is counted is the CPU time of this process. One thread infers.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from report import FOLDER, conditions, parser, write

from fleet.device.degrade.frames import Frames, Taken, Tracker
from fleet.device.degrade.governor import Decision
from fleet.device.degrade.tracker import Located, ShiftTracker
from fleet.device.engine import ENGINE_VERSION, RuntimeConfig, Session
from fleet.device.preprocess import Preprocess

CAMERA_HZ, SECONDS, ROUNDS = 30, 20, 7
MODES = (("every frame", 30.0), ("repeated", 15.0), ("tracked", 15.0), ("repeated", 10.0), ("repeated", 5.0))
"""What is in between, and inferences a second at most."""


@dataclass(frozen=True)
class Played:
    """One run."""

    cpu_ms: float
    inferred: int
    frames: int


def stream() -> list[npt.NDArray[np.uint8]]:
    """A second of a thing that moves 4 px a frame over a noisy background."""
    rng = np.random.default_rng(0)
    background = cv2.GaussianBlur(rng.integers(0, 256, (480, 640, 3), np.uint8), (9, 9), 0)
    thing = cv2.resize(rng.integers(0, 256, (8, 8, 3), np.uint8), (120, 120), interpolation=cv2.INTER_NEAREST)
    frames = []
    for number in range(CAMERA_HZ):
        frame = background.copy()
        left = 200 + 4 * number
        frame[180:300, left : left + 120] = thing
        frames.append(frame)
    return frames


def play(
    frames: list[npt.NDArray[np.uint8]], infer: Callable[[Any], Located], mode: str, fps: float
) -> Played:
    """Play the stream once."""
    now_s = 0.0
    tracker: Tracker[Located] | None = ShiftTracker() if mode == "tracked" else None
    answers = Frames(infer, tracker=tracker, clock=lambda: now_s)
    decision = Decision(fps=fps, model="full", paused=False, critical_only=False, reasons=())
    total = CAMERA_HZ * SECONDS
    started = time.process_time()
    for number in range(total):
        now_s = number / CAMERA_HZ
        answers.answer(Taken(frame=frames[number % len(frames)], captured_s=now_s), decision)
    cpu_ms = (time.process_time() - started) * 1e3
    return Played(cpu_ms, answers.counts["inferred"], total)


def measure(folder: Path, frames: list[npt.NDArray[np.uint8]]) -> list[dict[str, Any]]:
    """Every mode with one model, alternating."""
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    preprocess = Preprocess.from_dict(card["preprocess"])
    runs: dict[tuple[str, float], list[Played]] = {mode: [] for mode in MODES}
    with Session(folder / "model.mnn", config=RuntimeConfig(threads=1)) as session:
        name = next(iter(session.inputs))
        lefts = {id(frame): 200 + 4 * number for number, frame in enumerate(frames)}

        def infer(frame: npt.NDArray[np.uint8]) -> Located:
            logits = next(iter(session.run({name: preprocess.apply(frame)}).values())).ravel()
            best = int(logits.argmax())
            box = (lefts[id(frame)], 180, 120, 120)  # where a detector would find it
            return Located(label=str(best), confidence=1.0, box_xywh=box)

        play(frames, infer, "every frame", 30.0)  # the first inferences are slower
        for _ in range(ROUNDS):
            for mode in MODES:
                runs[mode].append(play(frames, infer, *mode))
    whole = statistics.median(run.cpu_ms for run in runs[MODES[0]])
    return [row(folder.name, mode, fps, runs[mode, fps], whole) for mode, fps in MODES]


def row(model: str, mode: str, fps: float, runs: list[Played], whole_ms: float) -> dict[str, Any]:
    """One line of the table."""
    costs = [run.cpu_ms for run in runs]
    cost = statistics.median(costs)
    return {
        "model": model,
        "between": mode,
        "fps": fps,
        "inferences_share": f"{runs[0].inferred / runs[0].frames:.0%}",
        "cpu_ms_per_frame": f"{cost / runs[0].frames:.3f}",
        "least_to_most": f"{min(costs) / runs[0].frames:.3f} to {max(costs) / runs[0].frames:.3f}",
        "cpu_saved": f"{1 - cost / whole_ms:.0%}",
    }


def main() -> None:
    """Measure every model named and write the result."""
    asked = parser(__doc__)
    asked.add_argument("folders", nargs="+", type=Path, help="of models: model.mnn with its card.json")
    folders = asked.parse_args().folders
    cv2.setNumThreads(1)
    frames = stream()
    rows = [row for folder in folders for row in measure(folder, frames)]
    write(
        FOLDER / "degrade.json",
        {
            "title": "What skipping frames saves",
            "command": f"python tests/bench/degrade.py {' '.join(map(str, folders))}",
            "text": f"{SECONDS} s of a made-up camera at {CAMERA_HZ} Hz, 640x480, played {ROUNDS} times in"
            " each mode, alternating; the median of the process's CPU time, preprocessing included, in ms for"
            " each camera frame; one thread. Saved is against inferring every frame. CPU time stands for"
            " energy, which this machine does not expose; a camera and a screen, which do not change, are"
            " not in it.",
            "conditions": conditions(engine=ENGINE_VERSION, rounds=ROUNDS, frames=CAMERA_HZ * SECONDS),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
