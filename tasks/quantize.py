"""The stage `quantize`: the float parent becomes an int8 model that learned its scales."""

import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks import tracking
from tasks.data.dataset import Dataset, Split
from tasks.nn.calibrate import Observer, calibrate
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.config import FitConfig
from tasks.nn.evaluate import evaluate
from tasks.nn.layer_error import LayerError, layer_errors
from tasks.nn.loop import fit
from tasks.nn.quantized import QuantizedModel
from tasks.stage import REPORTS, stage

DATA = Path("data/prepared")
CHECKPOINT = Path("models/quantize/checkpoint.pt")
LAYERS = REPORTS / "quantize_layers.csv"
RESUME = Path(".edgeloop/resume/quantize.pt")  # no out: DVC deletes outs before it runs a stage
_PARENTS = {"trained": Path("models/train/checkpoint.pt"), "pruned": Path("models/prune/checkpoint.pt")}
_FEW_IMAGES = 100


class QuantizeParams(FitConfig):
    """The section `quantize`: from which model, which layers, and (inherited) how QAT is trained."""

    parent: Literal["trained", "pruned"] = "pruned"
    """The float model to quantise."""
    teacher: Literal["parent", "trained", "none"] = "parent"
    """The float model whose soft labels join the loss of QAT."""
    epochs: int = Field(default=20, ge=0)
    """Epochs of quantisation-aware training; 0 leaves the calibrated model (PTQ)."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak rate of AdamW; scales are learned in the logarithm, so it is their relative change too."""
    warmup_epochs: float = Field(default=0.5, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    observer: Observer = "mse"
    """How the first scales come from calibration data: max_abs, percentile (99.99), or mse."""
    calibration_split: Literal["calibration", "train", "val"] = "calibration"
    """Where calibration images come from; the split `calibration` is disjoint from train and test."""
    calibration_batch_size: int = Field(default=64, ge=1)
    skip: tuple[str, ...] = ("first", "last")
    """Layers that stay float: first, last, and patterns for module names, e.g. `features.1.*`."""


def quantize(settings: QuantizeParams, run: tracking.Run | None = None) -> dict[str, float]:
    """Quantise the parent, write the checkpoint and the layer report, and return the report.

    Raises:
        UserError: params, data, parent or teacher cannot be used, or a layer cannot be quantised.
    """
    dataset, parent = Dataset.open(DATA), Checkpoint.load(_PARENTS[settings.parent])
    _check_labels(parent, dataset, _PARENTS[settings.parent])
    preprocess, float_model = parent.preprocess, parent.build()
    images = _calibration_images(dataset, preprocess, settings)
    model = QuantizedModel(float_model, settings.skip)

    def batches() -> Iterator[torch.Tensor]:
        yield from torch.split(images, settings.calibration_batch_size)

    calibrate(model.graph, batches, settings.observer)
    ptq = _accuracy(model.graph, dataset, preprocess)
    if settings.epochs:
        teacher = _teacher(settings, dataset, float_model)
        fit(
            model.graph,
            dataset,
            preprocess,
            settings,
            teacher=teacher,
            run=run,
            description="quantize",
            resume=RESUME,
        )
    model.freeze()
    model.to_checkpoint(parent).save(CHECKPOINT)
    errors = layer_errors(model, batches)
    _write_layers(errors, model)
    accuracies = {"fp32": _accuracy(float_model, dataset, preprocess), "ptq": ptq}
    accuracies["i8"] = _accuracy(model.graph, dataset, preprocess)
    return {
        **{f"{name}_{split}_top1": value for name, of in accuracies.items() for split, value in of.items()},
        "calibration_images_count": len(images),
        "calibration_is_disjoint": int(settings.calibration_split == "calibration"),
        "epochs": settings.epochs,
        "int8_layers_count": len(model.layers),
        "float_layers_count": len(model.plan.left_float),
        "float_layers_have_int8_weights": int(model.plan.weight_only_safe),
        "worst_layer_snr_db": errors[0].snr_db,
    }


def _calibration_images(dataset: Dataset, preprocess: Preprocess, settings: QuantizeParams) -> torch.Tensor:
    """Calibration images as model inputs, [N, 3, H, W]; says when they are few or not disjoint."""
    name = settings.calibration_split
    split: Split = dataset.split(name)
    if len(split) == 0:
        raise UserError(
            f"dataset {dataset.root} has no images in the split `{name}`",
            allowed="at least 1, better 100 to 500 images of the real scene",
            next_step="raise prepare's calibration share in params.yaml",
        )
    if len(split) < _FEW_IMAGES:
        print(f"quantize: only {len(split)} calibration images; 100 to 500 are usual", file=sys.stderr)
    if name != "calibration":
        print(
            f"quantize: calibrating on `{name}`, which the model was fitted to or chosen by", file=sys.stderr
        )
    chosen = np.arange(min(len(split), 500))
    return torch.from_numpy(preprocess.batch(list(split.images(chosen))))


def _check_labels(checkpoint: Checkpoint, dataset: Dataset, path: Path) -> None:
    if checkpoint.labels != dataset.label_names:
        raise UserError(
            f"{path} knows {len(checkpoint.labels)} classes, {dataset.root} has {len(dataset.label_names)}",
            allowed="the same class names in the same order",
            next_step="run `dvc repro` so that the model is trained on this dataset",
        )


def _teacher(settings: QuantizeParams, dataset: Dataset, float_model: nn.Module) -> nn.Module | None:
    if settings.teacher == "none":
        return None
    if settings.teacher == "parent":
        return float_model
    path = _PARENTS[settings.teacher]
    checkpoint = Checkpoint.load(path)
    _check_labels(checkpoint, dataset, path)
    return checkpoint.build()


def _accuracy(model: nn.Module, dataset: Dataset, preprocess: Preprocess) -> dict[str, float]:
    splits: tuple[Literal["val", "test"], ...] = ("val", "test")
    return {name: evaluate(model, dataset.split(name), preprocess).top1 for name in splits}


def _write_layers(errors: list[LayerError], model: QuantizedModel) -> None:
    """One row a layer, the int8 ones worst first, then those that stay float, with the reason."""
    LAYERS.parent.mkdir(parents=True, exist_ok=True)
    with LAYERS.open("w", encoding="utf-8", newline="") as file:
        fields = ["rank", "precision", "reason", *LayerError.__dataclass_fields__]
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for rank, error in enumerate(errors, start=1):
            numbers = {k: v if isinstance(v, str) else f"{v:.6g}" for k, v in asdict(error).items()}
            writer.writerow({"rank": rank, "precision": "int8", **numbers})
        for layer, reason in model.plan.left_float.items():
            writer.writerow({"precision": "float", "layer": layer, "reason": reason})


def main() -> None:
    """Run the stage in the current workspace."""
    with stage("quantize", QuantizeParams) as frame:
        frame.report(quantize(frame.params, frame.run))
        frame.run.artifact(LAYERS)


if __name__ == "__main__":
    main()
