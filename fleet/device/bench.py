"""One benchmark run of one model, in a process of its own: `python -m fleet.device.bench MODEL`.

It prints one JSON object with raw samples; statistics and verdicts are the lab's business (`fleet.lab`).
Only numpy, MNN and the standard library, so that the same file runs on a board or a phone.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from fleet.device.engine import ENGINE_VERSION, Array, RuntimeConfig, Session, TensorSpec
from fleet.device.preprocess import Preprocess

_STABLE_WINDOW = 20
_STABLE_WITHIN = 0.05
_CAMERA_SHAPE = (480, 640, 3)  # a VGA camera frame: what a phone app decodes before it preprocesses


def resident_mb(field: str = "VmRSS") -> float:
    """Resident memory of this process in MiB; `VmHWM` is its peak. Linux only, NaN elsewhere."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return float("nan")


def _feed(spec: TensorSpec, rng: np.random.Generator) -> Array:
    shape = tuple(n if n > 0 else 1 for n in spec.shape)
    if spec.dtype.startswith(("int", "uint")):
        return np.zeros(shape, spec.dtype)  # indices: zero is always valid
    return rng.standard_normal(shape).astype(np.float32)


def _warm_up(session: Session, feeds: dict[str, Array], max_queries: int) -> int:
    """Run until two neighbouring windows have medians within 5 %; returns the queries spent."""
    previous = float("inf")
    for done in range(_STABLE_WINDOW, max_queries + 1, _STABLE_WINDOW):
        window = []
        for _ in range(_STABLE_WINDOW):
            start = time.perf_counter()
            session.run(feeds)
            window.append(time.perf_counter() - start)
        median = float(np.median(window))
        if abs(median - previous) <= _STABLE_WITHIN * previous:
            return done
        previous = median
    return max_queries


def _end_to_end_ms(
    session: Session, preprocess: Preprocess, queries: int, rng: np.random.Generator
) -> list[float]:
    """Camera frame in, class out: preprocessing, inference and argmax, in ms."""
    frame = rng.integers(0, 256, _CAMERA_SHAPE, dtype=np.uint8)
    (name,) = session.inputs
    samples = []
    for _ in range(queries):
        start = time.perf_counter()
        outputs = session.run({name: preprocess.apply(frame)})
        int(np.argmax(next(iter(outputs.values()))))
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def run(
    model: Path,
    config: RuntimeConfig,
    *,
    queries: int,
    max_warmup: int,
    preprocess: Preprocess | None,
    seed: int,
) -> dict[str, Any]:
    """Load, first inference, warm-up, then `queries` timed inferences, one at a time.

    Returns:
        Raw samples in ms, memory in MiB, and `cpu_share`: CPU time of the timed part over its wall time times
        threads. Below about 0.9 with one thread somebody else had the core.
    """
    rng = np.random.default_rng(seed)
    before_mb = resident_mb()
    start = time.perf_counter()
    with Session(model, config=config) as session:
        load_ms = (time.perf_counter() - start) * 1e3
        feeds = {name: _feed(spec, rng) for name, spec in session.inputs.items()}
        loaded_mb = resident_mb()
        start = time.perf_counter()
        session.run(feeds)
        first_ms = (time.perf_counter() - start) * 1e3
        warmup = _warm_up(session, feeds, max_warmup)
        latency_ms = np.empty(queries)
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        for i in range(queries):
            start = time.perf_counter()
            session.run(feeds)
            latency_ms[i] = (time.perf_counter() - start) * 1e3
        wall_s = time.perf_counter() - wall_start
        cpu_share = (time.process_time() - cpu_start) / wall_s / config.threads
        end_to_end = _end_to_end_ms(session, preprocess, min(queries, 100), rng) if preprocess else []
        return {
            "engine_version": ENGINE_VERSION,
            "config": config.to_dict(),
            "load_ms": load_ms,
            "first_ms": first_ms,
            "warmup_queries": warmup,
            "latency_ms": latency_ms.tolist(),
            "end_to_end_ms": end_to_end,
            "cpu_share": cpu_share,
            "load_avg_1min": os.getloadavg()[0],
            "load_memory_mb": loaded_mb - before_mb,
            "peak_memory_mb": resident_mb("VmHWM") - before_mb,
            "session_memory_mb": session.memory_mb,
        }


def main() -> None:
    """Parse the command line, run, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", default="{}", help="runtime config as JSON, see RuntimeConfig")
    parser.add_argument("--preprocess", default="", help="preprocess record as JSON; adds end-to-end time")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--max-warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    preprocess = Preprocess.from_dict(json.loads(args.preprocess)) if args.preprocess else None
    result = run(
        args.model,
        RuntimeConfig(**json.loads(args.config)),
        queries=args.queries,
        max_warmup=args.max_warmup,
        preprocess=preprocess,
        seed=args.seed,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
