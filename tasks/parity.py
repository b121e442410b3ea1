"""Stage parity: the converted model is the model that was trained, shown on real test images.

A fixed sample goes through torch, ONNX Runtime and MNN and is compared element by element; the whole test set
goes through torch and MNN and is compared prediction by prediction. A failed comparison is a verdict in the
report, with the first diverging layer named, and the gate refuses it; only a model that cannot be read or run
is an error.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pandas as pd
import torch
from pydantic import Field
from torch import fx, nn

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset, Split
from tasks.mnn.bisect import first_divergence
from tasks.mnn.compare import Comparison, combine, compare
from tasks.mnn.torch_tensors import torch_tensors
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.evaluate import Evaluation, evaluate
from tasks.nn.fold import fold_batch_norms
from tasks.nn.reference import checkpoint_path, reference_model
from tasks.progress import track
from tasks.stage import Params, read_json, stage
from tasks.variants import Precision, Variant

# torch and ONNX Runtime compute the same float32 graph.
_EXPORT_TOLERANCE = 1e-4

PREDICTIONS = Path("models/parity/predictions.parquet")

Classes = npt.NDArray[np.int64]


class Tolerance(Params):
    """How far the engine may be from torch for one precision."""

    max_rel_error: float = Field(gt=0)
    """Largest error of any logit of any image, as a share of that image's range of logits."""
    min_cosine: float = Field(default=0.0, ge=-1, le=1)
    """Smallest cosine between the two logit vectors of any image."""
    min_agreement: float = Field(default=0.9, ge=0, le=1)
    """Smallest share of test images with the same prediction; below it something is broken and the layer is
    looked for. What a release needs is the gate's `min_agreement`, which is stricter."""


class Tolerances(Params):
    """One tolerance a precision."""

    fp32: Tolerance = Tolerance(max_rel_error=1e-4, min_cosine=0.999999)
    """float32 in another order of summation."""
    fp16: Tolerance = Tolerance(max_rel_error=5e-3, min_cosine=0.9999)
    """The reference has the weights as the converter stores them; constants inside operators (the 1/6 of a
    hard sigmoid) are stored in half precision too, and the reference's are not: 4e-4 on MobileNetV3-Small."""
    w8: Tolerance = Tolerance(max_rel_error=5e-3, min_cosine=0.9999)
    """The reference has the weights as the converter stores them."""
    i8: Tolerance = Tolerance(max_rel_error=0.25, min_cosine=0.98)
    """The reference is the fake-quant model: where a value lies on a rounding tie one step may flip and later
    layers carry it on. What such flips do to predictions is what `gate.min_agreement` bounds."""

    def of(self, precision: Precision) -> Tolerance:
        """The tolerance of one precision."""
        return {"fp32": self.fp32, "fp16": self.fp16, "w8": self.w8, "i8": self.i8}[precision]


class ParityParams(Params):
    """Section `parity` of params.yaml."""

    images: int = Field(default=64, ge=1)
    """Test images compared element by element, spread evenly over the test split."""
    batch_size: int = Field(default=256, ge=1)
    """Images per forward pass in torch; the engine runs one image at a time, as on a device."""
    tolerances: Tolerances = Tolerances()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One variant with all that is compared: files, card, and the torch model it came from."""

    variant: Variant
    onnx_path: Path
    mnn_path: Path
    preprocess: Preprocess
    input_name: str
    output_name: str
    reference: nn.Module
    """What the engine should compute, with weights as they are stored."""
    float_reference: nn.Module | None
    """What the ONNX graph should compute; None for i8: its graph does not round activations."""

    def feeds(self, image_HWC: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.float32]]:
        """One uint8 RGB image as the engine's input."""
        return {self.input_name: self.preprocess.apply(image_HWC)}

    @classmethod
    def load(cls, name: str, workspace: Path, dataset: Dataset) -> "Candidate":
        """Read a variant's card and hold it against checkpoint, dataset and model.

        Raises:
            UserError: the card tells something else than the checkpoint, the dataset or the model.
            EngineError: MNN does not open the model.
        """
        variant = Variant.parse(name)
        folder = workspace / "models/mnn" / name
        card = read_json(folder / "card.json")
        preprocess = Preprocess.from_dict(card["preprocess"])
        _check_card(name, card, preprocess, Checkpoint.load(checkpoint_path(variant, workspace)), dataset)
        _check_model(name, card, folder / "model.mnn")
        return cls(
            variant=variant,
            onnx_path=workspace / "models/export" / name / "model.onnx",
            mnn_path=folder / "model.mnn",
            preprocess=preprocess,
            input_name=card["inputs"][0]["name"],
            output_name=card["outputs"][0]["name"],
            reference=_as_stored(reference_model(variant, workspace), variant.precision),
            float_reference=None
            if variant.precision == "i8"
            else reference_model(replace(variant, precision="fp32"), workspace),
        )


def parity(params: ParityParams, workspace: Path = Path()) -> tuple[dict[str, Any], pd.DataFrame]:
    """Compare every variant under `models/mnn` with its torch model.

    Returns:
        The report (flat, `VARIANT/key`), and one row a test image: sha256, label, and the class index each
        variant predicted in the engine, for paired comparisons of releases.

    Raises:
        UserError: nothing was converted, or a card contradicts what it describes.
        EngineError: a model cannot be opened or run.
    """
    dataset = Dataset.open(workspace / "data/prepared")
    test = dataset.split("test")
    names = sorted(path.parent.name for path in (workspace / "models/mnn").glob("*/model.mnn"))
    if not names or len(test) == 0:
        raise UserError(
            f"{len(names)} converted models and {len(test)} test images in {workspace.resolve()}",
            allowed="at least one of each",
            next_step="run `dvc repro convert`; check prepare's split shares if there are no test images",
        )
    report: dict[str, Any] = {}
    predictions = pd.DataFrame({"sha256": test.sha256, "label": test.labels.astype(np.int16)})
    for name in names:
        candidate = Candidate.load(name, workspace, dataset)
        results, predicted = check(candidate, test, params)
        results |= {
            "mnn_sha256": hashlib.sha256(candidate.mnn_path.read_bytes()).hexdigest(),
            "preprocess_sha256": candidate.preprocess.digest(),
        }
        report |= {f"{name}/{key}": value for key, value in results.items()}
        predictions[name] = predicted.astype(np.int16)
    return report, predictions


def check(candidate: Candidate, test: Split, params: ParityParams) -> tuple[dict[str, Any], Classes]:
    """All measurements of one variant, the verdict, and the engine's class for each test image."""
    precision = candidate.variant.precision
    tolerance = params.tolerances.of(precision)
    in_torch = evaluate(candidate.reference, test, candidate.preprocess, params.batch_size)
    in_engine, int8_ops_count = _evaluate_in_engine(candidate, test)
    sample = np.unique(np.linspace(0, len(test) - 1, min(params.images, len(test))).round().astype(np.int64))
    engine = combine(map(compare, in_engine.logits[sample], in_torch.logits[sample]))
    onnx = _compare_export(candidate, test, sample)
    disagreements = int((in_torch.predictions != in_engine.predictions).sum())
    reasons = failures(tolerance, engine=engine, onnx=onnx, disagreements=disagreements, n=len(test))
    if precision == "i8" and int8_ops_count == 0:
        reasons.append("no operator ran in int8")
    results: dict[str, Any] = {
        "parity_ok": int(not reasons),
        "reason": "; ".join(reasons),
        "first_diverging_layer": "",
        "max_rel_error": _three_digits(engine.to_dict()["max_rel_error"]),
        "cosine": 1 - _three_digits(1 - engine.cosine),
        "tolerance_rel": tolerance.max_rel_error,
        "elementwise_n": len(sample),
        "agreement": 1 - disagreements / len(test),
        "n": len(test),
        "int8_ops_count": int8_ops_count,
    }
    if onnx:
        results["onnx_max_rel_error"] = _three_digits(onnx.to_dict()["max_rel_error"])
    if reasons:
        errors = [
            compare(*pair).max_rel_error for pair in zip(in_engine.logits, in_torch.logits, strict=True)
        ]
        worst = candidate.feeds(test.image(int(np.argmax(errors))))
        # Half of the worst error: predictions can differ too often while every error is within its limit.
        limit = min(tolerance.max_rel_error, max(errors) / 2)
        results["first_diverging_layer"] = _diverging_layer(candidate, worst, limit)
    if (test.labels >= 0).any():
        results |= {"top1": in_engine.top1, "top1_torch": in_torch.top1}
    return results, in_engine.predictions


def failures(
    tolerance: Tolerance, *, engine: Comparison, onnx: Comparison | None, disagreements: int, n: int
) -> list[str]:
    """Why parity is refused, one phrase a reason; empty when it holds."""
    reasons = []
    if engine.finite_count == 0:
        reasons.append("no finite value to compare")
    if engine.reason:
        reasons.append(engine.reason)
    elif engine.max_rel_error > tolerance.max_rel_error:
        reasons.append(f"error {engine.max_rel_error:.3g} of the range, allowed {tolerance.max_rel_error:g}")
    if engine.cosine < tolerance.min_cosine:
        reasons.append(f"cosine {engine.cosine:.6f}, at least {tolerance.min_cosine:g}")
    # On a small test set one near-tie must not decide: one image is always allowed.
    allowed = max(1, math.ceil((1 - tolerance.min_agreement) * n - 1e-9))
    if disagreements > allowed:
        reasons.append(f"another prediction on {disagreements} of {n} images, allowed {allowed}")
    if onnx and onnx.max_rel_error > _EXPORT_TOLERANCE:
        reasons.append(f"the exported ONNX is {onnx.max_rel_error:.3g} of the range from torch")
    return reasons


def _three_digits(value: float | str) -> float:
    """Rounding errors depend on how many threads torch sums with; a report should not."""
    return float(f"{value:.3g}")


def _check_card(
    name: str, card: dict[str, Any], preprocess: Preprocess, checkpoint: Checkpoint, dataset: Dataset
) -> None:
    _require(name, "preprocess", card["preprocess_sha256"], preprocess.digest(), "its own record's digest")
    _require(name, "preprocess", preprocess.to_dict(), checkpoint.preprocess.to_dict(), "the checkpoint's")
    _require(name, "labels", card["labels"], list(checkpoint.labels), "the checkpoint's")
    _require(name, "labels", card["labels"], list(dataset.label_names), "the dataset's")
    _require(name, "input shape", tuple(card["inputs"][0]["shape"]), preprocess.input_shape, "preprocess's")


def _check_model(name: str, card: dict[str, Any], path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    _require(name, "mnn_sha256", card["mnn_sha256"], digest, "the file's")
    with Session(path) as session:
        for side, specs in (("inputs", session.inputs), ("outputs", session.outputs)):
            said = [(t["name"], tuple(t["shape"]), t["dtype"]) for t in card[side]]
            _require(name, side, said, [(t.name, t.shape, t.dtype) for t in specs.values()], "the model's")


def _require(variant: str, what: str, got: object, want: object, whose: str) -> None:
    if got != want:
        raise UserError(
            f"{variant}: the card's {what} {got}",
            allowed=f"{whose}: {want}",
            next_step="run `dvc repro convert`, which writes card and model together",
        )


def _evaluate_in_engine(candidate: Candidate, test: Split) -> tuple[Evaluation, int]:
    """The test set through MNN, one image at a time as on a device, and how many operators ran in int8."""
    with Session(candidate.mnn_path) as session:
        _, ops = session.trace(candidate.feeds(test.image(0)))
        indices = track(range(len(test)), f"parity {candidate.variant.name}", len(test))
        logits = [session.run(candidate.feeds(test.image(i)))[candidate.output_name] for i in indices]
    return Evaluation(np.concatenate(logits), test.labels), sum(op.int8 for op in ops)


def _compare_export(candidate: Candidate, test: Split, sample: Classes) -> Comparison | None:
    """ONNX Runtime against torch in float32; None for i8."""
    if candidate.float_reference is None:
        return None
    session = onnxruntime.InferenceSession(str(candidate.onnx_path), providers=["CPUExecutionProvider"])
    comparisons = []
    for index in sample:
        feeds = candidate.feeds(test.image(int(index)))
        with torch.inference_mode():
            want = candidate.float_reference(torch.from_numpy(feeds[candidate.input_name])).numpy()
        comparisons.append(compare(session.run([candidate.output_name], feeds)[0], want))
    return combine(comparisons)


def _diverging_layer(
    candidate: Candidate, feeds: dict[str, npt.NDArray[np.float32]], max_rel_error: float
) -> str:
    """The first layer at which the engine leaves its reference, for a person to read."""
    reference = None
    if isinstance(
        candidate.reference, fx.GraphModule
    ):  # rounded weights or fake-quant: not what the ONNX computes
        reference = torch_tensors(candidate.reference, candidate.onnx_path, feeds[candidate.input_name])
    found = first_divergence(
        candidate.onnx_path,
        candidate.mnn_path,
        feeds,
        tolerance=max_rel_error,
        reference=reference,
    )
    return str(found) if found else "none: no compared layer leaves the reference"


def _as_stored(model: nn.Module, precision: Precision) -> nn.Module:
    """`model` with its weights as the converter stores them; the reference of w8 and i8 has them already.

    tasks.mnn.half rounds the weights of fp16 to the nearest float16, after batch norms are folded.
    """
    if precision != "fp16":
        return model
    folded = fold_batch_norms(model)
    for module in folded.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data = module.weight.data.half().float()
    return folded


def write_predictions(predictions: pd.DataFrame, path: Path) -> None:
    """Write the predictions as Parquet; the same predictions give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    predictions.to_parquet(path, index=False, compression="zstd")


def main() -> None:
    """Entry point of `python -m tasks.parity`."""
    with stage("parity", ParityParams) as run:
        report, predictions = parity(run.params)
        write_predictions(predictions, PREDICTIONS)
        run.report(report)


if __name__ == "__main__":
    main()
