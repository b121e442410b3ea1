"""Stage parity: the converted model is the model that was trained, shown on real test images.

A fixed sample goes through torch, ONNX Runtime and MNN and is compared element by element; the whole test set
goes through torch and MNN and is compared prediction by prediction. A failed comparison is a verdict in the
report, with the first diverging layer named, and the gate refuses it; only a model that cannot be read or run
is an error.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pandas as pd
from pydantic import Field
from torch import nn

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset, Split
from tasks.mnn.bisect import first_divergence
from tasks.mnn.compare import Comparison, combine, compare
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.evaluate import Evaluation, evaluate
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
    min_agreement: float = Field(default=0.99, ge=0, le=1)
    """Smallest share of test images with the same prediction."""


class Tolerances(Params):
    """One tolerance a precision."""

    fp32: Tolerance = Tolerance(max_rel_error=1e-4, min_cosine=0.999999)
    """float32 in another order of summation."""
    fp16: Tolerance = Tolerance(max_rel_error=1e-2, min_cosine=0.9999)
    """Weights rounded to 11 significant bits, 5e-4 each at most; the reference has exact weights."""
    w8: Tolerance = Tolerance(max_rel_error=0.2, min_cosine=0.99)
    """Weights rounded to 1/254 of each channel's range; the reference has exact weights."""
    i8: Tolerance = Tolerance(max_rel_error=0.2, min_cosine=0.99)
    """The reference is the fake-quant model: where a value lies on a rounding tie, one step may flip."""

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
        checkpoint = Checkpoint.load(checkpoint_path(variant, workspace))
        preprocess = Preprocess.from_dict(card["preprocess"])
        _require(
            name, "preprocess", card["preprocess_sha256"], preprocess.digest(), "its own record's digest"
        )
        _require(
            name, "preprocess", preprocess.to_dict(), checkpoint.preprocess.to_dict(), "the checkpoint's"
        )
        _require(name, "labels", card["labels"], list(checkpoint.labels), "the checkpoint's")
        _require(name, "labels", card["labels"], list(dataset.label_names), "the dataset's")
        with Session(folder / "model.mnn") as session:
            for side, specs in (("inputs", session.inputs), ("outputs", session.outputs)):
                said = [(t["name"], tuple(t["shape"]), t["dtype"]) for t in card[side]]
                _require(
                    name, side, said, [(t.name, t.shape, t.dtype) for t in specs.values()], "the model's"
                )
        _require(
            name, "input shape", tuple(card["inputs"][0]["shape"]), preprocess.input_shape, "preprocess's"
        )
        return cls(
            variant=variant,
            onnx_path=workspace / "models/export" / name / "model.onnx",
            mnn_path=folder / "model.mnn",
            preprocess=preprocess,
            input_name=card["inputs"][0]["name"],
            output_name=card["outputs"][0]["name"],
            reference=reference_model(variant, workspace),
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
    in_onnx = _onnx_logits(candidate, test, sample)
    want = in_torch.logits[sample]
    engine = combine(map(compare, in_engine.logits[sample], want))
    onnx = combine(map(compare, in_onnx, want))
    agreement = float((in_torch.predictions == in_engine.predictions).mean())
    reasons = failures(
        precision, tolerance, engine=engine, onnx=onnx, agreement=agreement, int8_ops_count=int8_ops_count
    )
    results: dict[str, Any] = {
        "parity_ok": int(not reasons),
        "reason": "; ".join(reasons),
        "first_diverging_layer": _diverging_layer(candidate, test, sample, in_engine, tolerance)
        if reasons
        else "",
        "max_rel_error": engine.to_dict()["max_rel_error"],
        "cosine": engine.cosine,
        "onnx_max_rel_error": onnx.to_dict()["max_rel_error"],
        "tolerance_rel": tolerance.max_rel_error,
        "elementwise_n": len(sample),
        "agreement": agreement,
        "n": len(test),
        "int8_ops_count": int8_ops_count,
    }
    if (test.labels >= 0).any():
        results |= {"top1": in_engine.top1, "top1_torch": in_torch.top1}
    return results, in_engine.predictions


def failures(
    precision: Precision,
    tolerance: Tolerance,
    *,
    engine: Comparison,
    onnx: Comparison,
    agreement: float,
    int8_ops_count: int,
) -> list[str]:
    """Why parity is refused, one sentence a reason; empty when it holds."""
    reasons = []
    if engine.finite_count == 0:
        reasons.append("no finite value to compare")
    if engine.reason:
        reasons.append(engine.reason)
    elif engine.max_rel_error > tolerance.max_rel_error:
        reasons.append(f"error {engine.max_rel_error:.3g} of the range, allowed {tolerance.max_rel_error:g}")
    if engine.cosine < tolerance.min_cosine:
        reasons.append(f"cosine {engine.cosine:.6f}, at least {tolerance.min_cosine:g}")
    if agreement < tolerance.min_agreement:
        reasons.append(
            f"same prediction on {agreement:.2%} of images, at least {tolerance.min_agreement:.2%}"
        )
    if precision == "i8" and int8_ops_count == 0:
        reasons.append("no operator ran in int8")
    # The ONNX graph is float32 whatever the variant; the i8 reference is not, it rounds like the engine.
    if precision != "i8" and onnx.max_rel_error > _EXPORT_TOLERANCE:
        reasons.append(f"the exported ONNX is {onnx.max_rel_error:.3g} of the range from torch")
    return reasons


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


def _onnx_logits(candidate: Candidate, test: Split, sample: Classes) -> npt.NDArray[np.float32]:
    session = onnxruntime.InferenceSession(str(candidate.onnx_path), providers=["CPUExecutionProvider"])
    runs = [session.run([candidate.output_name], candidate.feeds(test.image(int(i))))[0] for i in sample]
    return np.concatenate(runs)


def _diverging_layer(
    candidate: Candidate, test: Split, sample: Classes, in_engine: Evaluation, tolerance: Tolerance
) -> str:
    """The layer to look at, found on the sampled image on which engine and ONNX graph are furthest apart."""
    want = _onnx_logits(candidate, test, sample)
    errors = [compare(g, w).max_rel_error for g, w in zip(in_engine.logits[sample], want, strict=True)]
    found = first_divergence(
        candidate.onnx_path,
        candidate.mnn_path,
        candidate.feeds(test.image(int(sample[int(np.argmax(errors))]))),
        tolerance=tolerance.max_rel_error,
    )
    return str(found) if found else "none: the engine follows the exported ONNX, which differs from torch"


def _write(predictions: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    predictions.to_parquet(path, index=False, compression="zstd")


def main() -> None:
    """Entry point of `python -m tasks.parity`."""
    with stage("parity", ParityParams) as run:
        report, predictions = parity(run.params)
        _write(predictions, PREDICTIONS)
        run.report(report)


if __name__ == "__main__":
    main()
