"""Quantisation without training, compared in the engine: MNN's own tool, our observers, and QAT to beat.

    python -m tasks.ptq                                   # in a built workspace
    python -m tasks.ptq --methods KL mse --images 100 500 --json

Every model is measured on the test set, against the float model it came from. Two bad cases stand beside the good
ones: calibration on noise, and on images the model was trained on. Writes reports/ptq.json.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fleet.device.errors import EngineError, UserError
from tasks.data.dataset import Split
from tasks.int8_trial import Answers, Start, ask_engine, calibrated, inputs_of, to_engine
from tasks.mnn.calibration_checks import KnownImages, is_noise, noise_warning, overlap_warning
from tasks.mnn.ptq_tool import METHODS, layer_tensors, quantise
from tasks.nn.calibrate import Observer
from tasks.nn.quantized import QuantizedModel
from tasks.paired import Drop
from tasks.stage import REPORTS, write_json
from tasks.tool import print_json, tool

OBSERVERS: tuple[Observer, ...] = get_args(Observer)
COUNTS = (100, 500, 1000)
TIMEOUT_S = 900.0
_ENOUGH_IMAGES = 100

Images = npt.NDArray[np.uint8]
Source = Literal["scene", "noise", "train"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Images that scales are measured on."""

    name: str
    """scene, noise or train, and how many: scene-100."""
    images: Images
    """uint8 RGB [N, S, S, 3]."""
    warning: str
    """What is wrong with them; empty when nothing is."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model, measured in the engine on the test set."""

    method: str
    """fp32 and qat, which the workspace built, or how the activation scales were found."""
    calibration: str
    images_count: int
    int8_layers_count: int
    warning: str = ""
    failure: str = ""
    """Why there is no such model; then there are no answers either."""
    answers: Answers | None = None
    drop: Drop | None = None
    """Against fp32; None for fp32 itself."""
    agreement: float | None = None
    """Share of the test images with fp32's prediction."""

    @property
    def name(self) -> str:
        """Prefix of its keys in the report."""
        return f"{self.method}-{self.calibration}" if self.calibration else self.method

    def values(self) -> dict[str, Any]:
        """Flat keys with units; without numbers where there is no model."""
        found: dict[str, Any] = {"images_count": self.images_count, "warning": self.warning}
        if self.failure or self.answers is None:
            return found | {"failure": self.failure}
        found |= {
            "top1": self.answers.top1,
            "n": len(self.answers.right),
            "size_bytes": self.answers.size_bytes,
            "int8_layers_count": self.int8_layers_count,
            "int8_ops_count": self.answers.int8_ops_count,
            "ops_count": self.answers.ops_count,
        }
        if self.drop is not None and self.agreement is not None:
            of_drop = asdict(self.drop)
            found |= {key: round(of_drop[key], 4) for key in ("drop_pp", "low_pp", "high_pp")}
            found["agreement"] = self.agreement
        return found


def compare(
    start: Start, methods: Sequence[str], counts: Sequence[int], *, timeout_s: float = TIMEOUT_S
) -> list[Row]:
    """Quantise with every method on every calibration set, and measure all of them.

    A method that fails has a row that says why; the others go on.

    Args:
        start: Of a built workspace, the working directory.
        methods: Of METHODS and OBSERVERS.
        counts: Images of the scene; clipped to what there is. The bad cases get the first.
        timeout_s: Limit of one run of MNN's tool.

    Raises:
        UserError: the workspace is not built, or a split has no images.
        EngineError: a model that the workspace built does not run.
    """
    test = start.split("test")
    names = {p: start.parent.variant(p).name for p in ("fp32", "i8")}  # type: ignore[arg-type]
    floating, onnx = _built(names["fp32"], "mnn/{}/model.mnn"), _built(names["fp32"], "export/{}/model.onnx")
    trained = _built(names["i8"], "mnn/{}/model.mnn")
    before = ask_engine(floating, start.preprocess, test, "fp32")
    rows = [Row(method="fp32", calibration="", images_count=0, int8_layers_count=0, answers=before)]
    plan = QuantizedModel(start.parent.build(), start.settings.skip).plan
    after = ask_engine(trained, start.preprocess, test, "qat")
    rows.append(_row("qat", None, len(plan.layers), before, after))
    skip = tuple(layer_tensors(onnx, tuple(plan.left_float)))
    for calibration in calibrations(start, counts):
        if calibration.warning:
            print(f"ptq: {calibration.name}: {calibration.warning}", file=sys.stderr)
        for method in methods:
            with tempfile.TemporaryDirectory(prefix="edgeloop-ptq-") as folder:
                try:
                    made, layers = _make(start, method, calibration, onnx, skip, Path(folder), timeout_s)
                    what = f"{method}-{calibration.name}"
                    answers = ask_engine(made, start.preprocess, test, what)
                    rows.append(_row(method, calibration, layers, before, answers))
                except EngineError as error:
                    print(f"ptq: {method}-{calibration.name}: {error}", file=sys.stderr)
                    rows.append(_failed(method, calibration, error))
    return rows


def calibrations(start: Start, counts: Sequence[int]) -> Iterator[Calibration]:
    """The scene's images at each count, then the two bad cases.

    The scene's are the split `calibration`, and where it is too small the split `val` without its labels: no
    weight was fitted to it. Never train or test.
    """
    scene = [start.split("calibration"), start.split("val")]
    available = sum(map(len, scene))
    for count in dict.fromkeys(min(count, available) for count in counts):
        yield _checked(start, "scene", _first(scene, count))
    count = min(counts[0], available)
    size = start.dataset.stored_size
    rng = np.random.default_rng(0)
    yield _checked(start, "noise", rng.integers(0, 256, (count, size, size, 3), np.uint8))
    yield _checked(start, "train", _first([start.split("train")], count))


def _first(splits: Sequence[Split], count: int) -> Images:
    """The first images of some splits: rows of a split are in random order."""
    parts = []
    for split in splits:
        taken = min(count, len(split))
        if taken:
            parts.append(split.images(range(taken)))
            count -= taken
    return np.concatenate(parts)


def _checked(start: Start, source: Source, images: Images) -> Calibration:
    """Images with what the same checks say of them that `edgeloop convert` makes."""
    known = KnownImages.of(start.dataset.root, "this workspace")
    said = [
        noise_warning(sum(map(is_noise, images)), len(images)),
        "" if source == "scene" else overlap_warning(known.name, map(known.split_of, images)),
        f"only {len(images)} images" if len(images) < _ENOUGH_IMAGES else "",
    ]
    name = f"{source}-{len(images)}"
    return Calibration(name=name, images=images, warning="; ".join(filter(None, said)))


def _make(
    start: Start,
    method: str,
    calibration: Calibration,
    onnx: Path,
    skip: tuple[str, ...],
    folder: Path,
    timeout_s: float,
) -> tuple[Path, int]:
    """One int8 model, and how many of its layers are int8."""
    for tool_method in METHODS:
        if method == tool_method:
            out = folder / "model.mnn"
            images, preprocess = calibration.images, start.preprocess
            made = quantise(onnx, images, preprocess, out, tool_method, skip=skip, timeout_s=timeout_s)
            if made.not_skipped:
                print(f"ptq: {method} ignored {len(made.not_skipped)} layers to skip", file=sys.stderr)
            return made.path, len(made.int8_layers)
    inputs = inputs_of(calibration.images, start.preprocess)
    model = calibrated(start.parent, inputs, method, start.settings.skip)  # type: ignore[arg-type]
    conversion = to_engine(model, start.parent, folder)
    return conversion.path, len(conversion.audit.int8_layers)


def _row(method: str, calibration: Calibration | None, layers: int, before: Answers, after: Answers) -> Row:
    return Row(
        method=method,
        calibration=calibration.name if calibration else "",
        images_count=len(calibration.images) if calibration else 0,
        int8_layers_count=layers,
        warning=calibration.warning if calibration else "",
        answers=after,
        drop=after.drop_from(before),
        agreement=after.agreement(before),
    )


def _failed(method: str, calibration: Calibration, error: EngineError) -> Row:
    return Row(
        method=method,
        calibration=calibration.name,
        images_count=len(calibration.images),
        int8_layers_count=0,
        warning=calibration.warning,
        failure=error.reason,
    )


def _built(variant: str, where: str) -> Path:
    path = Path("models") / where.format(variant)
    if not path.is_file():
        raise UserError(
            f"{path} is missing",
            allowed=f"a built workspace whose export.variants hold {variant}",
            next_step="run `edgeloop build` here, with fp32 and i8 of quantize.parent in export.variants",
        )
    return path


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """reports/ptq.json: flat, NAME/key."""
    return {f"{row.name}/{key}": value for row in rows for key, value in row.values().items()}


def print_table(rows: Sequence[Row]) -> None:
    """For people, on stdout."""
    head = f"{'model':22}{'top-1':>9}{'drop pp':>9}{'95 % interval':>18}{'agree':>9}{'int8 layers, ops':>19}{'MB':>7}"
    print(head)
    for row in rows:
        if row.answers is None:
            print(f"{row.name:22}{'-':>9}  {row.failure}")
            continue
        line = f"{row.name:22}{row.answers.top1:>9.2%}"
        if row.drop is not None and row.agreement is not None:
            interval = f"{row.drop.low_pp:+.2f} to {row.drop.high_pp:+.2f}"
            line += f"{row.drop.drop_pp:>9.2f}{interval:>18}{row.agreement:>9.2%}"
        else:
            line += " " * 36
        counts = f"{row.int8_layers_count}, {row.answers.int8_ops_count}/{row.answers.ops_count}"
        print(f"{line}{counts:>19}{row.answers.size_bytes / 1e6:>7.2f}{'  !' if row.warning else ''}")
    n = next(len(row.answers.right) for row in rows if row.answers is not None)
    print(f"on {n} test images, in the engine; ! warned about: {REPORTS / 'ptq.json'} says why")


def main() -> None:
    """Compare in the current workspace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*METHODS, *OBSERVERS]
    parser.add_argument("--methods", nargs="+", choices=every, default=every, help="MNN's tool, then ours")
    parser.add_argument("--images", nargs="+", type=int, default=COUNTS, help="sizes of the calibration set")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds one run of MNN's tool may take")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    asked = parser.parse_args()
    with tool("ptq", as_json=asked.json):
        if min(asked.images) < 1:
            raise UserError(
                f"--images {min(asked.images)}", allowed="counts from 1", next_step="correct --images"
            )
        rows = compare(Start.of_workspace(), asked.methods, asked.images, timeout_s=asked.timeout)
        write_json(REPORTS / "ptq.json", report(rows))
        if asked.json:
            print_json(report(rows))
        else:
            print_table(rows)


if __name__ == "__main__":
    main()
