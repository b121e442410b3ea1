"""Quantisation without training, compared in the engine: MNN's own tool, our observers, and QAT to beat.

    python -m tasks.ptq                                   # in a built workspace
    python -m tasks.ptq --methods KL mse --images 100 500 --json

Every model is measured on the test set, against the float model it came from. Two bad cases stand beside the
good ones: calibration on noise, and on images the model was trained on. Writes reports/ptq.json.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from tasks.nn.qgraph import Plan
from tasks.nn.quantized import QuantizedModel
from tasks.paired import Paired
from tasks.stage import REPORTS, read_json, write_json
from tasks.tool import RAW, print_json, tool

OBSERVERS: tuple[Observer, ...] = get_args(Observer)
COUNTS = (100, 500, 1000)
TIMEOUT_S = 900.0
_ENOUGH_IMAGES = 100

Images = npt.NDArray[np.uint8]
Source = Literal["scene", "noise", "train"]


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
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
    drop: Paired | None = None
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
            found |= {key: round(getattr(self.drop, key), 4) for key in ("drop_pp", "low_pp", "high_pp")}
            found["agreement"] = self.agreement
        return found


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A built workspace in which quantised models are made and measured."""

    start: Start
    test: Split
    floating: Answers
    """What the float parent says in the engine."""
    onnx: Path
    """Of the float parent."""
    plan: Plan
    """Which of its layers the workspace's rules leave float; MNN's tool is told the same."""
    timeout_s: float
    """Limit of one run of MNN's tool."""

    @classmethod
    def of(cls, start: Start, timeout_s: float) -> "Bench":
        """Measure the float parent.

        Raises:
            UserError: the workspace is not built, or has no test images.
            EngineError: the model does not run.
        """
        test, name = start.split("test"), start.parent.variant("fp32").name
        mnn = _built(name, "mnn/{}/model.mnn")
        return cls(
            start=start,
            test=test,
            floating=ask_engine(mnn, start.preprocess, test, "fp32"),
            onnx=_built(name, "export/{}/model.onnx"),
            plan=QuantizedModel(start.parent.build(), start.settings.skip).plan,
            timeout_s=timeout_s,
        )

    def built(self) -> list[Row]:
        """The float parent, and the model that QAT made of it."""
        trained = _built(self.start.parent.variant("i8").name, "mnn/{}/model.mnn")
        answers = ask_engine(trained, self.start.preprocess, self.test, "qat")
        return [
            Row(method="fp32", calibration="", images_count=0, int8_layers_count=0, answers=self.floating),
            self._row("qat", None, answers, len(read_json(trained.with_name("card.json"))["int8_layers"])),
        ]

    def row(self, method: str, calibration: CalibrationSet) -> Row:
        """Quantise and measure; a method that fails has a row that says why."""
        try:
            with tempfile.TemporaryDirectory(prefix="edgeloop-ptq-") as folder:
                mnn, layers_count = self._make(method, calibration, Path(folder))
                what = f"{method}-{calibration.name}"
                answers = ask_engine(mnn, self.start.preprocess, self.test, what)
        except EngineError as error:
            print(f"ptq: {method}-{calibration.name}: {error}", file=sys.stderr)
            return Row(
                method=method,
                calibration=calibration.name,
                images_count=len(calibration.images),
                int8_layers_count=0,
                warning=calibration.warning,
                failure=error.reason,
            )
        return self._row(method, calibration, answers, layers_count)

    def _make(self, method: str, calibration: CalibrationSet, folder: Path) -> tuple[Path, int]:
        """An int8 model, and how many of its layers are int8."""
        start = self.start
        if method in METHODS:
            made = quantise(
                self.onnx,
                calibration.images,
                start.preprocess,
                folder / "model.mnn",
                method,
                skip=tuple(layer_tensors(self.onnx, tuple(self.plan.left_float))),
                timeout_s=self.timeout_s,
            )
            if made.not_skipped:
                print(f"ptq: {method} ignored {len(made.not_skipped)} layers to skip", file=sys.stderr)
            return made.path, len(made.int8_layers)
        assert method in OBSERVERS, method
        inputs = inputs_of(calibration.images, start.preprocess)
        model = calibrated(start.parent, inputs, method, start.settings.skip)
        conversion = to_engine(model, start.parent, folder)
        return conversion.path, len(conversion.audit.int8_layers)

    def _row(self, method: str, calibration: CalibrationSet | None, answers: Answers, layers: int) -> Row:
        return Row(
            method=method,
            calibration=calibration.name if calibration else "",
            images_count=len(calibration.images) if calibration else 0,
            int8_layers_count=layers,
            warning=calibration.warning if calibration else "",
            answers=answers,
            drop=answers.drop_from(self.floating),
            agreement=answers.agreement(self.floating),
        )


def compare(
    start: Start, methods: Sequence[str], counts: Sequence[int], *, timeout_s: float = TIMEOUT_S
) -> Iterator[Row]:
    """Quantise with every method on every calibration set, and measure each.

    Args:
        start: Of a built workspace, the working directory.
        methods: Of METHODS and OBSERVERS.
        counts: Images of the scene; clipped to what there is. The bad cases get the first.
        timeout_s: Limit of one run of MNN's tool.

    Raises:
        UserError: the workspace is not built, or a split has no images.
        EngineError: a model that the workspace built does not run.
    """
    bench = Bench.of(start, timeout_s)
    yield from bench.built()
    for calibration in calibrations(start, counts):
        if calibration.warning:
            print(f"ptq: {calibration.name}: {calibration.warning}", file=sys.stderr)
        yield from (bench.row(method, calibration) for method in methods)


def calibrations(start: Start, counts: Sequence[int]) -> Iterator[CalibrationSet]:
    """The scene's images, the two bad cases beside them, then more of the scene's.

    The scene's are the split `calibration`, and where it is too small the split `val` without its labels: no
    weight was fitted to it. Never train or test.
    """
    scene = [start.split("calibration"), start.split("val")]
    available = sum(map(len, scene))
    first, *others = dict.fromkeys(min(count, available) for count in counts)
    size, rng = start.dataset.stored_size, np.random.default_rng(0)
    known = KnownImages.of(start.dataset.root, "this workspace")
    yield _checked(known, "scene", _first(scene, first))
    yield _checked(known, "noise", rng.integers(0, 256, (first, size, size, 3), np.uint8))
    yield _checked(known, "train", _first([start.split("train")], first))
    for count in others:
        yield _checked(known, "scene", _first(scene, count))


def _first(splits: Sequence[Split], count: int) -> Images:
    """The first images of some splits: rows of a split are in random order."""
    parts = []
    for split in splits:
        taken = min(count, len(split))
        if taken:
            parts.append(split.images(range(taken)))
            count -= taken
    return np.concatenate(parts)


def _checked(known: KnownImages, source: Source, images: Images) -> CalibrationSet:
    """Images with what the same checks say of them that `edgeloop convert` makes."""
    said = [
        noise_warning(sum(map(is_noise, images)), len(images)),
        "" if source == "scene" else overlap_warning(known.name, map(known.split_of, images)),
        f"only {len(images)} images" if len(images) < _ENOUGH_IMAGES else "",
    ]
    name = f"{source}-{len(images)}"
    return CalibrationSet(name=name, images=images, warning="; ".join(filter(None, said)))


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
    columns = ("top-1", "drop pp", "95 % interval", "agreement", "int8 layers", "int8 ops", "MB")
    print(f"{'model':22}" + "".join(f"{name:>{max(10, len(name) + 3)}}" for name in columns))
    for row in rows:
        cells = _cells(row)
        text = "".join(f"{cell:>{max(10, len(name) + 3)}}" for name, cell in zip(columns, cells, strict=True))
        print(f"{row.name:22}{text}{'  !' if row.warning else ''}{'  ' + row.failure if row.failure else ''}")
    n = next(len(row.answers.right) for row in rows if row.answers is not None)
    print(f"on {n} test images, in the engine; ! warned about, {REPORTS / 'ptq.json'} says why")


def _cells(row: Row) -> tuple[str, ...]:
    answers, drop, agreement = row.answers, row.drop, row.agreement
    if answers is None:
        return ("-",) * 7
    return (
        f"{answers.top1:.2%}",
        f"{drop.drop_pp:.2f}" if drop else "",
        f"{drop.low_pp:+.2f}..{drop.high_pp:+.2f}" if drop else "",
        "" if agreement is None else f"{agreement:.2%}",
        str(row.int8_layers_count),
        f"{answers.int8_ops_count}/{answers.ops_count}",
        f"{answers.size_bytes / 1e6:.2f}",
    )


def main() -> None:
    """Compare in the current workspace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    every = [*METHODS, *OBSERVERS]
    parser.add_argument("--methods", nargs="+", choices=every, default=every, help="MNN's tool, then ours")
    parser.add_argument("--images", nargs="+", type=int, default=COUNTS, help="sizes of the calibration set")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="seconds one run of MNN's tool may take"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    asked = parser.parse_args()
    with tool("ptq", as_json=asked.json):
        if min(asked.images) < 1:
            raise UserError(
                f"--images {min(asked.images)}", allowed="counts from 1", next_step="correct --images"
            )
        rows = list(compare(Start.of_workspace(), asked.methods, asked.images, timeout_s=asked.timeout))
        write_json(REPORTS / "ptq.json", report(rows))
        if asked.json:
            print_json(report(rows))
        else:
            print_table(rows)


if __name__ == "__main__":
    main()
