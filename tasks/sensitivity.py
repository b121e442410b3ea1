"""Which layers int8 costs most, and which to leave float for an accuracy budget.

    python -m tasks.sensitivity                       # in a built workspace: rank the layers
    python -m tasks.sensitivity --budget-pp 0.5       # and find a skip list, tried in the engine

Layers are ranked on the validation split; the test set is used once, for the engine's before and after.
Writes reports/sensitivity.{json,csv,svg}; prints the YAML for `quantize.skip` and changes no params.yaml.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fleet.device.errors import EngineError, UserError
from tasks.int8_trial import Answers, Start, ask_engine, inputs_of, to_engine
from tasks.mnn.ptq_tool import layer_tensors
from tasks.nn.calibrate import Observer
from tasks.nn.sensitivity import LayerCost, Trials, layer_costs
from tasks.nn.skip_search import SkipList, search
from tasks.paired import Paired
from tasks.provenance import sha256_of
from tasks.sensitivity_files import write_csv, write_svg
from tasks.stage import REPORTS, write_json
from tasks.tool import RAW, print_json, tool

IMAGES = 1000
_CALIBRATION_IMAGES = 500  # what the stage quantize takes
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class InEngine:
    """A skip list measured on the test set, against the float model in the engine."""

    before: Paired
    after: Paired
    before_int8_ops_count: int
    after_int8_ops_count: int
    before_size_bytes: int
    after_size_bytes: int
    float_layers_have_int8_weights: bool
    """With the skip list. The engine takes a convolution with int8 weights between two int8 tensors for an
    int8 one, so a list that makes such a layer leaves all float layers' weights in float32: a larger file."""


def trials_of(start: Start, observer: Observer, images: int | None) -> Trials:
    """The workspace's float model, its calibration split, and validation images to count on.

    Args:
        start: Of the workspace.
        observer: How steps follow from calibration images.
        images: The first so many labelled ones of the split `val`; None for all.

    Raises:
        UserError: a split is missing or empty, or no layer can be int8.
    """
    calibration, val = start.split("calibration"), start.split("val")
    known = [index for index in range(len(val)) if val.labels[index] >= 0][:images]
    if not known:
        raise UserError(
            f"dataset {start.dataset.root} has no labelled images in the split `val`",
            allowed="at least one; 1,000 tell layers apart",
            next_step="raise prepare.holdout.val in params.yaml, then run `edgeloop build`",
        )
    first = calibration.images(range(min(len(calibration), _CALIBRATION_IMAGES)))
    return Trials(
        build=start.parent.build,
        calibration=inputs_of(first, start.preprocess),
        observer=observer,
        skip=start.settings.skip,
        images=inputs_of(val.images(known), start.preprocess),
        labels=val.labels[known],
    )


def try_in_engine(start: Start, trials: Trials, skipped: Sequence[str]) -> InEngine:
    """Convert the model with and without the skip list, and count both on the test set.

    Raises:
        EngineError: a conversion failed, or a layer that was skipped ran in int8.
        UserError: the test split is empty, or the float model was not converted.
    """
    test = start.split("test")
    name = start.parent.variant("fp32").name
    floating = ask_engine(Path("models/mnn") / name / "model.mnn", start.preprocess, test, "fp32")
    with tempfile.TemporaryDirectory(prefix="edgeloop-skip-") as folder:
        before = _converted(start, trials, (), Path(folder) / "before")
        after = _converted(start, trials, skipped, Path(folder) / "after")
    return InEngine(
        before=before.drop_from(floating),
        after=after.drop_from(floating),
        before_int8_ops_count=before.int8_ops_count,
        after_int8_ops_count=after.int8_ops_count,
        before_size_bytes=before.size_bytes,
        after_size_bytes=after.size_bytes,
        float_layers_have_int8_weights=trials.quantized(skipped).plan.weight_only_safe,
    )


def _converted(start: Start, trials: Trials, skipped: Sequence[str], folder: Path) -> Answers:
    conversion = to_engine(trials.deployed(skipped), start.parent, folder)
    answers = ask_engine(conversion.path, start.preprocess, start.split("test"), folder.name)
    (onnx,) = folder.glob("*/model.onnx")
    ran = set(layer_tensors(onnx, skipped)) & set(answers.int8_ops)
    if ran:
        raise EngineError(f"layers that were skipped ran in int8: {', '.join(sorted(ran))}")
    return answers


def report(
    start: Start,
    trials: Trials,
    costs: Sequence[LayerCost],
    observer: Observer,
) -> dict[str, Any]:
    """reports/sensitivity.json without a skip list: what was measured on what."""
    whole = trials.drop(trials.floating, trials.ask(trials.deployed(()).graph))
    certain = [cost.layer for cost in costs if cost.alone.low_pp > 0]
    return {
        "checkpoint_sha256": sha256_of(start.path),
        "observer": observer,
        "n": len(trials.labels),
        "layers_count": len(costs),
        "certain_count": len(certain),
        "worst_layer": costs[0].layer,
        **_drop_values("all_int8", whole),
    }


def skip_values(start: Start, budget_pp: float, skip: SkipList, engine: InEngine) -> dict[str, Any]:
    """What reports/sensitivity.json has besides when a skip list was asked for."""
    return {
        "budget_pp": budget_pp,
        "skip": [*start.settings.skip, *skip.layers],
        "skip_added_count": len(skip.layers),
        **_drop_values("val_before", skip.before),
        **_drop_values("val_after", skip.after),
        **_drop_values("test_before", engine.before),
        **_drop_values("test_after", engine.after),
        "before_int8_ops_count": engine.before_int8_ops_count,
        "after_int8_ops_count": engine.after_int8_ops_count,
        "before_size_bytes": engine.before_size_bytes,
        "after_size_bytes": engine.after_size_bytes,
        "float_layers_have_int8_weights": int(engine.float_layers_have_int8_weights),
    }


def skip_yaml(rules: Sequence[str]) -> str:
    """The lines for params.yaml."""
    return "\n".join(["quantize:", "  skip:", *(f"    - {rule}" for rule in rules)])


def _drop_values(prefix: str, drop: Paired) -> dict[str, float]:
    return {
        f"{prefix}_drop_pp": round(drop.drop_pp, 4),
        f"{prefix}_low_pp": round(drop.low_pp, 4),
        f"{prefix}_high_pp": round(drop.high_pp, 4),
        f"{prefix}_n": drop.n,
    }


def print_ranking(costs: Sequence[LayerCost], values: dict[str, Any]) -> None:
    """The most sensitive layers, and how far the images can tell them apart."""
    print(f"{'':4}{'layer':32}{'alone pp':>9}{'95 % interval':>18}{'logits dB':>11}{'given back pp':>15}")
    for cost in costs[:_SHOWN]:
        interval = f"{cost.alone.low_pp:+.2f} to {cost.alone.high_pp:+.2f}"
        print(
            f"{cost.rank:<4}{cost.layer:32}{cost.alone.drop_pp:>9.2f}{interval:>18}{cost.logits_snr_db:>11.1f}"
            f"{cost.given_back.drop_pp:>15.2f}"
        )
    print(
        f"{values['certain_count']} of {len(costs)} layers lose anything for certain on n = {values['n']}"
        f" validation images; the others are ties, ranked by the error in the logits.\nAll in int8:"
        f" {_said(values, 'all_int8')}"
    )


def _print_skip(values: dict[str, Any]) -> None:
    print(f"\nwithin {values['budget_pp']:g} pp with {values['skip_added_count']} more layers left float:\n")
    print(skip_yaml(values["skip"]))
    for split in ("val", "test"):
        what = "validation, fake-quant" if split == "val" else "test, engine"
        print(f"\n{what}: {_said(values, f'{split}_before')} -> {_said(values, f'{split}_after')}", end="")
    counts = [values[f"{when}_int8_ops_count"] for when in ("before", "after")]
    sizes = [values[f"{when}_size_bytes"] / 1e6 for when in ("before", "after")]
    stored = "int8" if values["float_layers_have_int8_weights"] else "float32"
    print(f"\nint8 operators {counts[0]} -> {counts[1]}, {sizes[0]:.2f} -> {sizes[1]:.2f} MB", end="")
    print(f" (weights of the float layers with the list: {stored})")


def _said(values: dict[str, Any], prefix: str) -> str:
    low, high = values[f"{prefix}_low_pp"], values[f"{prefix}_high_pp"]
    return (
        f"{values[f'{prefix}_drop_pp']:.2f} pp lost ({low:+.2f} to {high:+.2f}, n = {values[f'{prefix}_n']})"
    )


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("--images", type=int, default=IMAGES, help="validation images the ranking counts")
    parser.add_argument("--observer", choices=get_args(Observer), help="default: quantize.observer")
    parser.add_argument("--budget-pp", type=float, help="find a skip list that keeps int8 within it of float")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser.parse_args()


def main() -> None:
    """Rank the layers of the current workspace."""
    asked = _parsed()
    with tool("sensitivity", as_json=asked.json):
        if asked.images < 1 or not (asked.budget_pp is None or asked.budget_pp >= 0):
            raise UserError(
                f"--images {asked.images} --budget-pp {asked.budget_pp}",
                allowed="images from 1, a budget of 0 or more percentage points",
                next_step="correct the options",
            )
        start = Start.of_workspace()
        observer = asked.observer or start.settings.observer
        trials = trials_of(start, observer, asked.images)
        costs = layer_costs(trials)
        write_csv(costs, REPORTS / "sensitivity.csv")
        write_svg(costs, REPORTS / "sensitivity.svg")
        values = report(start, trials, costs, observer)
        write_json(REPORTS / "sensitivity.json", values)
        if not asked.json:
            print_ranking(costs, values)
        if asked.budget_pp is not None:
            every = trials_of(start, observer, None)
            skip = search(every, costs, asked.budget_pp)
            print("sensitivity: trying the skip list in the engine", file=sys.stderr)
            values |= skip_values(start, asked.budget_pp, skip, try_in_engine(start, every, skip.layers))
            write_json(REPORTS / "sensitivity.json", values)
            if not asked.json:
                _print_skip(values)
        if asked.json:
            print_json(values)


if __name__ == "__main__":
    main()
