"""Time of every operator that ran, in a process of its own: `python -m fleet.device.profile OPTIONS`.

The engine calls back around each operator, so a profiled inference is slower than a plain one: shares and
ratios mean something, and the sum is no latency. An operator of a few microseconds is measured too long.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleet.device.bench import random_feeds, warm_up
from fleet.device.engine import OpRun, RuntimeConfig, Session
from fleet.device.program import answer


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One operator of the graph as it ran."""

    layer: str
    op_type: str
    int8: bool
    p50_ms: float
    work_m: float
    """Millions of multiply-accumulates; of elements where the operator has none."""


def profile(
    model: Path,
    config: RuntimeConfig,
    *,
    runs: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
) -> list[LayerTime]:
    """Median time of each operator over `runs` inferences after a warm-up, in the order they ran.

    An operator that ran several times in one inference, in a loop, is listed as often.

    Raises:
        UserError, EngineError: as `fleet.device.bench.run`.
    """
    with Session(model, config=config, shapes=shapes) as session:
        feeds = random_feeds(session, np.random.default_rng(seed))
        warm_up(lambda: sum(op.duration_ms for op in session.trace(feeds)[1]) / 1e3)
        times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        found: dict[tuple[str, str, int], OpRun] = {}
        for _ in range(runs):
            seen: dict[tuple[str, str], int] = defaultdict(int)
            for op in session.trace(feeds)[1]:
                key = op.name, op.type, seen[op.name, op.type]
                seen[op.name, op.type] += 1
                times[key].append(op.duration_ms)
                found.setdefault(key, op)
    return [
        LayerTime(
            layer=op.name,
            op_type=op.type,
            int8=op.int8,
            p50_ms=float(np.median(times[key])),
            work_m=op.work_m,
        )
        for key, op in found.items()
    ]


def _program(options: dict[str, Any]) -> list[dict[str, Any]]:
    layers = profile(
        Path(options["model"]),
        RuntimeConfig(**options["config"]),
        runs=options["runs"],
        shapes={name: tuple(shape) for name, shape in options["shapes"].items()},
        seed=options["seed"],
    )
    return [asdict(layer) for layer in layers]


if __name__ == "__main__":
    answer(_program)
