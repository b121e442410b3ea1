"""The stage `train`: the prepared images become a float model, with its curves and its size."""

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fleet.device.errors import EdgeloopError, UserError
from fleet.device.preprocess import ColorOrder, Interpolation, Preprocess
from tasks import tracking
from tasks.data.dataset import Dataset, Split
from tasks.nn import distributed
from tasks.nn.arch import Activation, Architecture
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.init import InitFile, Loaded, load_matching, read_state, torchvision_state
from tasks.nn.loop import Epoch, FitConfig, evaluate, fit
from tasks.nn.macs import macs, params
from tasks.stage import REPORTS, Params, load_params, read_json, stage, write_text

DATA = Path("data/prepared")
CHECKPOINT = Path("models/train/checkpoint.pt")
CURVES = REPORTS / "train_curves.csv"
RESUME = Path(".edgeloop/resume/train.pt")  # no out: DVC deletes outs before it runs a stage

# What deployed classifiers usually are (row S1 of the requirements); outside is said, not refused.
_USUAL_SIZE_MAX_PX = 320
_USUAL_PARAMS = (1e6, 20e6)
_USUAL_FLOPS = (100e6, 2e9)
"""Of an image of 224 px, which most are made for; in proportion to its area at other sizes."""
_USUAL_SIZE_PX = 224


class InputParams(Params):
    """The preprocess contract's fields that a user chooses; see fleet.device.preprocess.Preprocess."""

    size_px: int
    interpolation: Interpolation = "area"
    color_order: ColorOrder = "RGB"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def contract(self) -> Preprocess:
        """The record every later stage and the device use."""
        return Preprocess(**self.model_dump())


class TrainParams(FitConfig):
    """The section `train`: what to train, from what, and (inherited) how."""

    architecture: str = "mobilenet_v3_small"
    """torchvision's name of a classification model."""
    activation: Activation = "default"
    """relu6 replaces Hardswish, for engines that have no fast one."""
    preprocess: InputParams
    init: Literal["none", "torchvision"] | InitFile = "none"
    """Initial weights: none, torchvision's (needs a network), or a file."""
    teacher: InitFile | None = None
    """An edgeloop checkpoint of a larger model with the same classes to distil from."""


def _require_valid_data() -> None:
    """Refuse data that validate refused: its report is written either way."""
    count = read_json(REPORTS / "validate.json").get("critical_failures_count")
    if count != 0:
        raise UserError(
            f"reports/validate.json with critical_failures_count {count}",
            allowed="a dataset that passed every critical rule",
            next_step="mend the data as reports/validate.json says, then `dvc repro`",
        )


def train(settings: TrainParams, run: tracking.Run | None = None) -> dict[str, float]:
    """Train, write the checkpoint and the curves, and return the report.

    Raises:
        UserError: params, data, initial weights or teacher cannot be used.
    """
    _require_valid_data()
    dataset, preprocess = Dataset.open(DATA), settings.preprocess.contract()
    test = _labelled_test(dataset)
    architecture = Architecture(
        name=settings.architecture, num_classes=len(dataset.label_names), activation=settings.activation
    )
    model, loaded = _initial_model(architecture, settings)
    size = {"params_count": params(model), "macs_count": _macs(model, settings)}
    _say_unusual(preprocess.size_px, **size)
    teacher = None if settings.teacher is None else _teacher(settings.teacher, dataset, preprocess)
    result = fit(model, dataset, preprocess, settings, teacher=teacher, run=run, resume=RESUME)
    evaluation = evaluate(model, test, preprocess)
    if distributed.rank() == 0:
        checkpoint = Checkpoint(
            architecture=architecture,
            state=result.state,
            preprocess=preprocess,
            labels=dataset.label_names,
        )
        checkpoint.save(CHECKPOINT)
        _write_curves(result.history)
    return {
        "val_top1": result.val_top1,
        "test_top1": evaluation.top1,
        "kept_epoch": result.epoch,
        "epochs": settings.epochs,
        "bf16": int(result.bf16),
        "size_px": preprocess.size_px,
        "num_classes": len(dataset.label_names),
        "init_tensors_loaded_count": loaded.loaded_count,
        "init_tensors_fresh_count": loaded.fresh_count,
        **size,
    }


def _labelled_test(dataset: Dataset) -> Split:
    test = dataset.split("test")
    if not (test.labels >= 0).any():
        raise UserError(
            f"dataset {dataset.root} without a labelled test image",
            allowed="at least one labelled image in the split `test`",
            next_step="change prepare's split shares in params.yaml and run `dvc repro`",
        )
    return test


def _initial_model(architecture: Architecture, settings: TrainParams) -> tuple[nn.Module, Loaded]:
    """The model with the weights training starts from, and how many of them came from elsewhere."""
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = architecture.build()
    if settings.init == "none":
        return model, Loaded(loaded_count=0, fresh_count=len(model.state_dict()))
    if settings.init == "torchvision":
        state, origin = torchvision_state(architecture.name), "torchvision"
    else:
        state, origin = read_state(settings.init), str(settings.init.file)
    loaded = load_matching(model, state, origin=origin)
    print(
        f"train: {loaded.loaded_count} tensors from {origin}, {loaded.fresh_count} of the classifier fresh",
        file=sys.stderr,
    )
    return model, loaded


def _macs(model: nn.Module, settings: TrainParams) -> int:
    """The count of one image; as the first forward pass it also shows whether the input size fits."""
    size_px = settings.preprocess.size_px
    try:
        return macs(model, (1, 3, size_px, size_px))
    except (RuntimeError, AssertionError) as error:  # torch's words for a map that shrank to nothing
        raise UserError(
            f"train.preprocess.size_px = {size_px} with {settings.architecture}: {error}",
            allowed="an input the architecture takes; transformers take the size they are built for, 224 px",
            next_step="change size_px or architecture in params.yaml",
        ) from error


def _teacher(source: InitFile, dataset: Dataset, preprocess: Preprocess) -> nn.Module:
    """The teacher's model, after its hash, its classes and its input contract are checked."""
    read_state(source)
    checkpoint = Checkpoint.load(source.file)
    if checkpoint.labels != dataset.label_names or checkpoint.preprocess != preprocess:
        raise UserError(
            f"train.teacher {source.file}: {len(checkpoint.labels)} labels, {checkpoint.preprocess}",
            allowed=f"the {len(dataset.label_names)} labels of the dataset in its order, and {preprocess}",
            next_step="train the teacher in this workspace with the same train.preprocess",
        )
    return checkpoint.build()


def _say_unusual(size_px: int, *, params_count: int, macs_count: int) -> None:
    """Say on stderr what is outside the usual range of deployed classifiers; measured latency decides."""
    notes = []
    if size_px > _USUAL_SIZE_MAX_PX:
        notes.append(f"input {size_px} px is larger than the usual {_USUAL_SIZE_MAX_PX} px")
    area = (size_px / _USUAL_SIZE_PX) ** 2
    for name, value, (low, high) in (
        ("parameters", params_count, _USUAL_PARAMS),
        (f"FLOPs an image of {size_px} px", 2 * macs_count, tuple(area * f for f in _USUAL_FLOPS)),
    ):
        if not low <= value <= high:
            usual = f"{low / 1e6:.4g} to {high / 1e6:.4g} M; measured latency decides"
            notes.append(f"{value / 1e6:.4g} M {name} are outside the usual {usual}")
    for note in notes if distributed.rank() == 0 else ():
        print(f"train: {note}", file=sys.stderr)


def _write_curves(history: Sequence[Epoch]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(Epoch.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(entry) for entry in history)
    write_text(CURVES, text.getvalue())


def _follow() -> None:
    """What ranks other than the first do: train along, write nothing, leave error messages to rank 0."""
    try:
        train(load_params("train", TrainParams))
    except EdgeloopError as error:
        raise SystemExit(error.exit_code) from error


def main() -> None:
    """Run the stage in the current workspace, alone or under torchrun."""
    with distributed.group():
        if distributed.rank() > 0:
            _follow()
            return
        with stage("train", TrainParams) as frame:
            frame.report(train(frame.params, frame.run))
            frame.run.artifact(CURVES)


if __name__ == "__main__":
    main()
