"""Int8 models to try and throw away: calibrated without training, converted, counted in the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.convert import convert_variant
from tasks.data.dataset import PREPARED, Dataset, Split
from tasks.export import export_variant
from tasks.mnn.converter import Conversion
from tasks.nn.calibrate import Observer, calibrate
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.quantized import QuantizedModel
from tasks.paired import Paired
from tasks.progress import track
from tasks.quantize import QuantizeParams
from tasks.stage import load_params

BATCH = 64
CHECKPOINTS = {"trained": Path("models/train/checkpoint.pt"), "pruned": Path("models/prune/checkpoint.pt")}

Classes = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a workspace starts from when it quantises."""

    settings: QuantizeParams
    path: Path
    """Of the float checkpoint."""
    parent: Checkpoint
    dataset: Dataset

    @property
    def preprocess(self) -> Preprocess:
        """How an image becomes an input."""
        return self.parent.preprocess

    @classmethod
    def of_workspace(cls, workspace: Path = Path()) -> "Start":
        """Read params, parent and dataset.

        Raises:
            UserError: the workspace is not built, its checkpoint is damaged, or it belongs to other data.
        """
        settings = load_params("quantize", QuantizeParams, workspace)
        path = workspace / CHECKPOINTS[settings.parent]
        dataset, parent = Dataset.open(workspace / PREPARED), Checkpoint.load(path)
        if parent.labels != dataset.label_names:
            raise UserError(
                f"{path} knows {len(parent.labels)} classes, {dataset.root} has {len(dataset.label_names)}",
                allowed="the same class names in the same order",
                next_step="run `edgeloop build` so that the model is trained on this dataset",
            )
        return cls(settings=settings, path=path, parent=parent, dataset=dataset)

    def split(self, name: str) -> Split:
        """A split that has images.

        Raises:
            UserError: it has none.
        """
        found = self.dataset.split(name)  # type: ignore[arg-type]  # callers pass literals
        if len(found) == 0:
            raise UserError(
                f"dataset {self.dataset.root} has no images in the split `{name}`",
                allowed="at least one",
                next_step="raise prepare's share of this split in params.yaml, then run `edgeloop build`",
            )
        return found


def inputs_of(images: npt.NDArray[np.uint8], preprocess: Preprocess) -> torch.Tensor:
    """Stored images, uint8 RGB [N, S, S, 3], as model inputs, float32 [N, 3, H, W]."""
    return torch.from_numpy(preprocess.batch(list(images)))


def calibrated(
    parent: Checkpoint, inputs: torch.Tensor, observer: Observer, skip: Sequence[str]
) -> QuantizedModel:
    """The parent in int8 without training, float layers' weights not yet rounded.

    Raises:
        UserError: there are no images, or a pattern of `skip` names no layer, or no layer is left.
    """
    model = QuantizedModel(parent.build(), skip)

    def batches() -> Iterator[torch.Tensor]:
        yield from torch.split(inputs, BATCH)

    calibrate(model.graph, batches, observer)
    return model


def to_engine(model: QuantizedModel, parent: Checkpoint, folder: Path) -> Conversion:
    """Freeze, export and convert: the same way the stages go, audit included.

    Args:
        model: Calibrated; its float layers are rounded as the converter will.
        parent: Of the model.
        folder: For all files; the model is `folder / "mnn/model.mnn"`.

    Raises:
        EngineError: the conversion failed, or a layer is not in the precision it was asked in.
    """
    model.freeze()
    checkpoint = model.to_checkpoint(parent)
    variant = checkpoint.variant("i8")
    export_variant(variant, checkpoint, folder / variant.name, biz_code="edgeloop")
    return convert_variant(folder / variant.name, folder / "mnn", timeout_s=600.0)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a model says in the engine about every image of a split."""

    classes: Classes
    labels: Classes
    """-1 where unknown; such images do not count."""
    int8_ops: tuple[str, ...]
    """Names of the operators that computed in int8."""
    ops_count: int
    size_bytes: int

    @property
    def int8_ops_count(self) -> int:
        """How many operators computed in int8."""
        return len(self.int8_ops)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which images have a label."""
        return self.labels >= 0

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Whether each labelled image is recognised."""
        flags: npt.NDArray[np.bool_] = (self.classes == self.labels)[self.known]
        return flags

    @property
    def top1(self) -> float:
        """Share of the labelled images, 0..1."""
        return float(self.right.mean())

    def drop_from(self, before: "Answers") -> Paired:
        """What is lost against another model on the same images."""
        return Paired.of(before.right, self.right)

    def agreement(self, other: "Answers") -> float:
        """Share of all images with the same prediction, 0..1."""
        return float((self.classes == other.classes).mean())


def ask_engine(mnn: Path, preprocess: Preprocess, split: Split, what: str) -> Answers:
    """A split through the engine, one image at a time as on a device.

    Raises:
        UserError: the file is missing.
        EngineError: the model does not open or run.
    """
    with Session(mnn) as session:
        (name,), (output,) = session.inputs, session.outputs
        _, ops = session.trace({name: preprocess.apply(split.image(0))})
        indices = track(range(len(split)), f"engine {what}", len(split))
        classes = [
            int(session.run({name: preprocess.apply(split.image(i))})[output].argmax()) for i in indices
        ]
    return Answers(
        classes=np.array(classes, np.int64),
        labels=split.labels,
        int8_ops=tuple(op.name for op in ops if op.int8),
        ops_count=len(ops),
        size_bytes=mnn.stat().st_size,
    )
