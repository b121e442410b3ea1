"""Quantisation without training against QAT, and skip lists under a budget, on built workspaces.

python tests/bench/ptq.py [FOLDER ...]           # digits and cifar10; docs/results/ptq.json
python tests/bench/ptq.py --skip [FOLDER ...]    # cifar10 and grocery; docs/results/skip_list.json
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import FOLDER, conditions, parser, write

from fleet.device.engine import ENGINE_VERSION
from tasks.int8_trial import Start
from tasks.nn.sensitivity import layer_costs
from tasks.nn.skip_search import search
from tasks.ptq import COUNTS, METHODS, OBSERVERS, Row, compare
from tasks.quantize import QuantizeParams
from tasks.sensitivity import IMAGES, report, skip_values, trials_of, try_in_engine
from tasks.workspace import workspace_name

ROOT = Path(__file__).resolve().parents[2]
BUDGET_PP = 0.5
TIMEOUT_S = 3600.0  # ADMM takes half a second an image on a busy core

PTQ_TEXT = """\
One float model a preset (30 % of its channels pruned), made int8 by each method on each calibration set,
measured in the engine on the whole test set. `drop` is against the float model in the engine, with the 95 %
interval of the paired difference (Newcombe, method 10); `agreement` is the share of test images with the
float model's prediction; `qat` is the model that the build makes by training, with the preset's own list of
float layers; all others but EMA leave the first and the last layer float. KL, ADMM and EMA are MNN's own
tool, the others set the scales of our fake-quant model. scene-N: N images of the calibration split and,
where it has fewer, of the validation split without its labels; digits has 305 of both. noise and train are
the bad cases that are warned about: random pixels, and images the model was trained on. The tool quantises
every tensor, ours those the engine's rules reach from the listed convolutions; EMA does not read the list
of layers to skip."""

SKIP_TEXT = f"""\
Calibrated without training with the first and the last layer float, then more left float until the observed
loss on the validation split is at most {BUDGET_PP} pp: the most sensitive first, ranked on its first
{IMAGES} images (or all). `test` is measured in the engine with the first list and with the longer one,
against the float model, with the 95 % interval of the paired difference (Newcombe, method 10). `certain
layers`: those that lose anything for certain when quantised alone."""


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """Work in a workspace."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def plain_start() -> Start:
    """The workspace's start with the skip list that every preset begins with, whatever its own has become."""
    start = Start.of_workspace()
    return replace(start, settings=start.settings.model_copy(update={"skip": QuantizeParams().skip}))


def ptq_row(preset: str, row: Row) -> dict[str, Any]:
    """One line of the table."""
    values = row.values()
    if row.failure:
        return {"preset": preset, "model": row.name, "top-1 %": row.failure} | dict.fromkeys(_REST, "")
    drop = row.drop
    return {
        "preset": preset,
        "model": row.name,
        "top-1 %": f"{100 * values['top1']:.2f}",
        "drop pp": f"{drop.drop_pp:+.2f}" if drop else "",
        "95 %": f"{drop.low_pp:+.2f} to {drop.high_pp:+.2f}" if drop else "",
        "agreement %": f"{100 * values['agreement']:.2f}" if drop else "",
        "int8 layers": values["int8_layers_count"],
        "int8 ops": f"{values['int8_ops_count']} of {values['ops_count']}",
        "MB": f"{values['size_bytes'] / 1e6:.2f}",
        "n": values["n"],
        "warned": "yes" if row.warning else "",
    }


_REST = ("drop pp", "95 %", "agreement %", "int8 layers", "int8 ops", "MB", "n", "warned")


def bench_ptq(folders: list[Path]) -> Iterator[dict[str, Any]]:
    """All methods on all calibration sets; the result so far after each, because it takes long."""
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    for folder in folders:
        with inside(folder):
            name, start = workspace_name(folder.resolve()), plain_start()
            for row in compare(start, [*METHODS, *OBSERVERS], COUNTS, timeout_s=TIMEOUT_S):
                rows.append(ptq_row(name, row))
                raw[f"{name}/{row.name}"] = row.values()
                yield {
                    "title": "Quantisation without training",
                    "text": PTQ_TEXT,
                    "rows": rows,
                    "measured": raw,
                }


def bench_skip(folders: list[Path]) -> Iterator[dict[str, Any]]:
    """A ranking and a skip list a workspace."""
    rows, raw = [], {}
    for folder in folders:
        with inside(folder):
            start, begun = plain_start(), time.monotonic()
            observer = start.settings.observer
            trials = trials_of(start, observer, IMAGES)
            costs = layer_costs(trials)
            seconds = time.monotonic() - begun
            every = trials_of(start, observer, None)
            skip = search(every, costs, BUDGET_PP)
            values = report(start, trials, costs, observer)
            values |= skip_values(start, BUDGET_PP, skip, try_in_engine(start, every, skip.layers))
        name = workspace_name(folder.resolve())
        raw[name] = values | {"ranking_seconds": round(seconds)}
        rows.append(
            {
                "preset": name,
                "layers left float": ", ".join(skip.layers) or "none",
                "certain layers": f"{values['certain_count']} of {values['layers_count']}, n = {values['n']}",
                "val before, pp": _said(values, "val_before"),
                "val after, pp": _said(values, "val_after"),
                "test before, pp": _said(values, "test_before"),
                "test after, pp": _said(values, "test_after"),
                "int8 ops": f"{values['before_int8_ops_count']} to {values['after_int8_ops_count']}",
                "MB": f"{values['before_size_bytes'] / 1e6:.2f} to {values['after_size_bytes'] / 1e6:.2f}",
            }
        )
        yield {"title": "Skip lists under a budget", "text": SKIP_TEXT, "rows": rows, "measured": raw}


def _said(values: dict[str, Any], prefix: str) -> str:
    drop, low, high, n = (values[f"{prefix}_{key}"] for key in ("drop_pp", "low_pp", "high_pp", "n"))
    return f"{drop:.2f} ({low:+.2f} to {high:+.2f}), n = {n}"


def main() -> None:
    """Parse, measure, write the result."""
    asked_for = parser(__doc__)
    asked_for.add_argument("folders", nargs="*", type=Path)
    asked_for.add_argument("--skip", action="store_true", help="skip lists instead of the comparison")
    asked_for.add_argument("--out", type=Path, default=FOLDER)
    asked = asked_for.parse_args()
    presets = ROOT / "presets"
    defaults = [presets / "cifar10", presets / "grocery"] if asked.skip else [ROOT, presets / "cifar10"]
    folders = [folder.resolve() for folder in asked.folders or defaults]
    command = "python tests/bench/ptq.py" + (" --skip" if asked.skip else "")
    path = asked.out.resolve() / ("skip_list.json" if asked.skip else "ptq.json")
    for result in bench_skip(folders) if asked.skip else bench_ptq(folders):
        write(path, {"command": command, "conditions": conditions(engine=f"MNN {ENGINE_VERSION}"), **result})


if __name__ == "__main__":
    main()
