"""The stage `export`: each variant as ONNX, with the card that says what it is and what must hold of it."""

import hashlib
import shutil
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator
from torch import nn

from fleet.device.errors import UserError
from tasks.mnn.compression import compression
from tasks.mnn.onnx_export import export_onnx
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.quantized import QuantizedModel
from tasks.stage import Params, stage, write_json
from tasks.variants import Precision, Variant

OUT = Path("models/export")
INPUT_NAME, OUTPUT_NAME = "input", "logits"
_TRAINED, _PRUNED = Path("models/train/checkpoint.pt"), Path("models/prune/checkpoint.pt")
_QUANTIZED = Path("models/quantize/checkpoint.pt")


class Variants(Params):
    """Which precisions are exported of which float model."""

    trained: tuple[Precision, ...] = ("fp32",)
    pruned: tuple[Precision, ...] = ("fp32", "fp16", "w8", "i8")

    @field_validator("trained", "pruned")
    @classmethod
    def _distinct(cls, precisions: tuple[Precision, ...]) -> tuple[Precision, ...]:
        if len(set(precisions)) != len(precisions):
            raise ValueError("a precision is listed twice")
        return precisions

    @model_validator(mode="after")
    def _with_parents(self) -> Self:
        """The gate holds each variant against the one it was made from: said before hours of training."""
        for name, precisions in (("trained", self.trained), ("pruned", self.pruned)):
            if precisions and "fp32" not in precisions:
                raise ValueError(f"{name}: {', '.join(precisions)} without fp32, which they are held against")
        if self.pruned and not self.trained:
            raise ValueError("pruned without trained: [fp32], which its fp32 is held against")
        return self


class ExportParams(Params):
    """The section `export`."""

    variants: Variants = Variants()
    biz_code: str = Field(default="edgeloop", pattern=r"[A-Za-z0-9_.-]{1,64}")
    """Business tag in the card and in the model."""


def export(settings: ExportParams) -> dict[str, float]:
    """Write `models/export/VARIANT/` for every variant asked for, and return the report.

    Raises:
        UserError: a checkpoint is missing or does not belong to the others, or two variants have one name.
        EngineError: a model does not export.
    """
    jobs: dict[str, tuple[Variant, Checkpoint]] = {}
    asked = [(_TRAINED, p) for p in settings.variants.trained] + [
        (_PRUNED, p) for p in settings.variants.pruned
    ]
    for source, precision in asked:
        checkpoint = _checkpoint(source, precision)
        variant = checkpoint.variant(precision)
        if variant.name in jobs:
            raise UserError(
                f"export.variants gives {variant.name} twice",
                allowed="each variant once",
                next_step="remove one of them: the pruned model has the channels of the trained one",
            )
        jobs[variant.name] = (variant, checkpoint)
    if not jobs:
        raise UserError(
            "export.variants is empty",
            allowed="at least one precision",
            next_step="name one, e.g. trained: [fp32]",
        )
    made = OUT.with_name(f"{OUT.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    report: dict[str, float] = {}
    for name, (variant, checkpoint) in jobs.items():
        values = export_variant(variant, checkpoint, made / name, biz_code=settings.biz_code)
        report |= {f"{name}/{key}": value for key, value in values.items()}
    shutil.rmtree(OUT, ignore_errors=True)
    made.rename(OUT)
    return report


def export_variant(
    variant: Variant, checkpoint: Checkpoint, folder: Path, *, biz_code: str
) -> dict[str, float]:
    """Write one variant's ONNX, card and, for i8, compression parameters.

    Returns:
        size_bytes of the ONNX, params_count, int8_layers_count, and weight_bits of the layers not in int8.
    """
    onnx_path = folder / "model.onnx"
    int8_layers: tuple[str, ...] = ()
    weight_bits = 8 if variant.precision == "w8" else None
    if variant.precision == "i8":
        quantized = QuantizedModel.from_checkpoint(checkpoint)
        model: nn.Module = quantized.float_twin(checkpoint.architecture)
        weight_bits = 8 if quantized.plan.weight_only_safe else None
        export_onnx(model, checkpoint.preprocess, onnx_path, input_name=INPUT_NAME, output_name=OUTPUT_NAME)
        told = compression(onnx_path, quantized.scales())
        write_json(folder / "compression.json", told.parameters)
        int8_layers = told.int8_tensors
    else:
        model = checkpoint.build()
        export_onnx(model, checkpoint.preprocess, onnx_path, input_name=INPUT_NAME, output_name=OUTPUT_NAME)
    card = _card(variant, checkpoint, onnx_path)
    card |= {"biz_code": biz_code, "int8_layers": list(int8_layers), "weight_bits": weight_bits}
    write_json(folder / "card.json", card)
    return {
        "size_bytes": onnx_path.stat().st_size,
        "params_count": sum(parameter.numel() for parameter in model.parameters()),
        "int8_layers_count": len(int8_layers),
        "weight_bits": {"fp32": 32, "fp16": 16, "w8": 8, "i8": weight_bits or 32}[variant.precision],
    }


def _checkpoint(source: Path, precision: Precision) -> Checkpoint:
    """The checkpoint a variant comes from; for i8 the quantised one, which must come from `source`."""
    if precision != "i8":
        return Checkpoint.load(source)
    quantized, parent = Checkpoint.load(_QUANTIZED), Checkpoint.load(source)
    if quantized.architecture != parent.architecture or quantized.pruned_percent != parent.pruned_percent:
        raise UserError(
            f"export.variants asks for the i8 of {source}, {_QUANTIZED} is {quantized.variant('i8').name}",
            allowed=f"the quantised form of {parent.variant('fp32').name}",
            next_step="set quantize.parent to the model that lists i8 in export.variants",
        )
    return quantized


def _card(variant: Variant, checkpoint: Checkpoint, onnx_path: Path) -> dict[str, Any]:
    """What holds of a variant whatever the converter makes of it."""
    preprocess = checkpoint.preprocess
    return {
        "variant": variant.name,
        "architecture": checkpoint.architecture.to_dict(),
        "labels": list(checkpoint.labels),
        "inputs": [
            {
                "name": INPUT_NAME,
                "shape": list(preprocess.input_shape),
                "dtype": preprocess.dtype,
                "layout": preprocess.layout,
            }
        ],
        "outputs": [
            {"name": OUTPUT_NAME, "shape": [1, len(checkpoint.labels)], "dtype": "float32", "layout": "NC"}
        ],
        "preprocess": preprocess.to_dict(),
        "preprocess_sha256": preprocess.digest(),
        "source_sha256": hashlib.sha256(onnx_path.read_bytes()).hexdigest(),
    }


def main() -> None:
    """Run the stage in the current workspace."""
    with stage("export", ExportParams) as frame:
        frame.report(export(frame.params))


if __name__ == "__main__":
    main()
