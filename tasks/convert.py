"""The stage `convert`: each exported variant through the guarded converter, audited, its card completed."""

import csv
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fleet.device.errors import EngineError, UserError
from tasks.mnn.audit import Audit
from tasks.mnn.converter import Conversion, convert
from tasks.mnn.int8_record import int8_layers
from tasks.mnn.request import ConvertOptions
from tasks.mnn.support import NOTES
from tasks.progress import track
from tasks.stage import REPORTS, Params, read_json, stage, write_json
from tasks.variants import Variant

IN, OUT = Path("models/export"), Path("models/mnn")
OPS_CSV = REPORTS / "convert_ops.csv"
_CARD_KEYS = {"variant", "biz_code", "weight_bits", "int8_layers", "source_sha256", "inputs", "outputs"}


class ConvertParams(Params):
    """The section `convert`."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Limit for each of a conversion's child processes."""


def convert_all(settings: ConvertParams) -> dict[str, float]:
    """Write `models/mnn/VARIANT/` for every exported variant and `reports/convert_ops.csv`.

    Returns:
        The report, per variant: size_bytes, ops_count, int8_ops_count (that computed in int8 in a run),
        int8_layers_count, and the layers by the storage of their weights.

    Raises:
        UserError: nothing was exported, or a card does not belong to its files.
        EngineError: a conversion failed or its audit found something.
    """
    folders = sorted(path.parent for path in IN.glob("*/card.json"))
    if not folders:
        raise UserError(
            f"{IN} holds no exported variant",
            allowed="models/export/VARIANT/card.json beside model.onnx",
            next_step="run the stage export: `dvc repro export`",
        )
    made = OUT.with_name(f"{OUT.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    report: dict[str, float] = {}
    audits: dict[str, Audit] = {}
    for folder in track(folders, "convert", len(folders)):
        conversion = convert_variant(folder, made / folder.name, timeout_s=settings.timeout_s)
        audits[folder.name] = conversion.audit
        report |= {f"{folder.name}/{key}": value for key, value in _numbers(conversion).items()}
    shutil.rmtree(OUT, ignore_errors=True)
    made.rename(OUT)
    _write_ops(audits)
    return report


def convert_variant(exported: Path, out: Path, *, timeout_s: float) -> Conversion:
    """Convert one exported variant and complete its card.

    Raises:
        UserError: the card does not belong to the files beside it.
        EngineError: the conversion failed, or the model is not what the card says.
    """
    card = _card(exported)
    options = _options(exported, card, timeout_s)
    asked = [layer.output for layer in int8_layers(options.compression)]
    _match(exported, "int8_layers", card["int8_layers"], asked)
    conversion = convert(exported / "model.onnx", out / "model.mnn", options)
    _match(exported, "source_sha256", card["source_sha256"], conversion.source_sha256)
    for side, specs in (("inputs", conversion.inputs), ("outputs", conversion.outputs)):
        seen = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
        _match(exported, side, [[s["name"], s["shape"], s["dtype"]] for s in card[side]], seen)
    if asked and not conversion.int8_ops_ran:
        raise EngineError(
            f"{exported.name}: {len(asked)} layers are int8 in the model, none of them ran in int8"
        )
    completed = {
        "engine_version": conversion.engine_version,
        "mnn_sha256": conversion.sha256,
        "size_bytes": conversion.size_bytes,
        "int8_layers": list(conversion.audit.int8_layers),
    }
    write_json(out / "card.json", card | completed)
    return conversion


def _card(exported: Path) -> dict[str, Any]:
    card = read_json(exported / "card.json")
    missing = _CARD_KEYS - set(card if isinstance(card, dict) else ())
    if missing:
        raise UserError(
            f"{exported / 'card.json'} lacks {', '.join(sorted(missing))}",
            allowed="the card the stage export writes",
            next_step="run the stage export again: `dvc repro --force export`",
        )
    return dict(card)


def _options(exported: Path, card: Mapping[str, Any], timeout_s: float) -> ConvertOptions:
    precision = Variant.parse(card["variant"]).precision
    _match(exported, "variant", card["variant"], exported.name)
    return ConvertOptions(
        biz_code=card["biz_code"],
        fp16=precision == "fp16",
        weight_bits=card["weight_bits"],
        compression=exported / "compression.json" if precision == "i8" else None,
        timeout_s=timeout_s,
    )


def _match(exported: Path, key: str, in_card: object, found: object) -> None:
    if in_card != found:
        raise UserError(
            f"{exported / 'card.json'} says {key} = {in_card}, its files say {found}",
            allowed="a card that belongs to the files beside it",
            next_step="run the stage export again: `dvc repro --force export`",
        )


def _numbers(conversion: Conversion) -> dict[str, float]:
    found = conversion.audit
    stored = {f"layers_{kind}_count": found.weights.get(kind, 0) for kind in ("float32", "float16", "int8")}
    return {
        "size_bytes": conversion.size_bytes,
        "expected_size_bytes": found.expected_size_bytes,
        "ops_count": sum(found.ops.values()),
        "int8_ops_count": conversion.int8_ops_ran or 0,
        "int8_layers_count": len(found.int8_layers),
        **stored,
    }


def _write_ops(audits: Mapping[str, Audit]) -> None:
    """The operator lists side by side: what the ONNX has, what the model has, what went and what came."""
    OPS_CSV.parent.mkdir(parents=True, exist_ok=True)
    with OPS_CSV.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("variant", "list", "op", "count", "note"))
        writer.writerows(row for name, found in audits.items() for row in _op_rows(name, found))


def _op_rows(variant: str, found: Audit) -> Iterator[tuple[str, str, str, int, str]]:
    """Only operators of the ONNX have a note: those one can replace when one designs the network."""
    lists = {"onnx": found.onnx_ops, "mnn": found.ops, "absorbed": found.absorbed, "added": found.added}
    for label, ops in lists.items():
        for op, count in ops.items():
            yield variant, label, op, count, NOTES.get(op, "") if label == "onnx" else ""


def main() -> None:
    """Run the stage in the current workspace."""
    with stage("convert", ConvertParams) as frame:
        frame.report(convert_all(frame.params))


if __name__ == "__main__":
    main()
