"""Real images for int8: read as the model gets them, told apart, and divided into measuring and proving."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError
from fleet.device.preprocess import Layout, Preprocess
from tasks.data.decode import Decoded, decode
from tasks.mnn.calibration_checks import KnownImages, is_noise, noise_warning, overlap_warning
from tasks.mnn.onnx_inputs import GraphInput, explicit_shapes
from tasks.mnn.picture_folder import SUFFIXES
from tasks.progress import track

Array = npt.NDArray[Any]

RECOMMENDED_IMAGES = 500
FEWEST_IMAGES = 100
"""Below this the scales of rare activations are a matter of luck."""
FEWEST_DIFFERENT = 8
"""Below this there is nothing to measure a range on."""
_KEPT = 5  # every fifth image is kept for the proof
_LOOK_PX, _LEAST_DIFFERENCE = 16, 2.0  # root mean square, of 255
_LONGEST = 200  # characters of a user's file in a message


@dataclass(frozen=True, kw_only=True)
class Split:
    """Real images for scales, and others for the proof that the scales hold on images they have not seen."""

    measured: "Calibration"
    kept: "Calibration"
    count: int
    """Of both, without images that look like another."""

    @property
    def warning(self) -> str:
        """What is wrong with the number of images; empty when nothing is."""
        if self.count >= FEWEST_IMAGES:
            return ""
        return (
            f"calibrated on {self.count} images: use {RECOMMENDED_IMAGES} or more, at least {FEWEST_IMAGES}, "
            "from the scene and neither trained on nor tested on"
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Real images as model inputs."""

    files: tuple[Path, ...]
    input_name: str
    preprocess: Preprocess

    def feeds(self, batch: int, count: int | None = None) -> Iterator[dict[str, Array]]:
        """The first `count` images in batches of exactly `batch`, an incomplete one left out.

        Raises:
            UserError: a file is no usable image.
        """
        files = self.files[:count]
        for start in range(0, len(files) - batch + 1, batch):
            images = [_read(file) for file in files[start : start + batch]]
            yield {self.input_name: self.preprocess.batch(images)}

    def split(self, batch: int) -> Split:
        """The images that differ from each other, some kept apart from those that scales are measured on.

        Args:
            batch: Images that one run needs at most; each side gets at least as many.

        Raises:
            UserError: too few images differ from each other.
        """
        different = self._different()
        fewest = max(FEWEST_DIFFERENT, 2 * batch)
        if len(different) < fewest:
            raise UserError(
                f"{len(self.files)} calibration images, of which {len(different)} differ from each other",
                allowed=f"at least {fewest} different pictures, better {RECOMMENDED_IMAGES}",
                next_step="add pictures from the scene: copies, flat colours and other exposures count once",
            )
        step = max(2, min(_KEPT, len(different) // batch))
        kept = different[step // 2 :: step]
        apart = set(kept)
        measured = tuple(file for file in different if file not in apart)
        return Split(
            measured=replace(self, files=measured), kept=replace(self, files=kept), count=len(different)
        )

    def warnings(self, known: Sequence[KnownImages]) -> list[str]:
        """What is wrong with the images themselves: noise, or pictures that a dataset uses otherwise.

        Args:
            known: The datasets to look in.

        Raises:
            UserError: a file is no usable image.
        """
        noisy, splits = 0, [list[str | None]() for _ in known]
        for file in track(self.files, "calibrate: check images", len(self.files)):
            image = _read(file)
            noisy += is_noise(image)
            for dataset, found in zip(known, splits, strict=True):
                found.append(dataset.split_of(image))
        said = [noise_warning(noisy, len(self.files))]
        said += [overlap_warning(d.name, found) for d, found in zip(known, splits, strict=True)]
        return [warning for warning in said if warning]

    def _different(self) -> tuple[Path, ...]:
        """The images without those that look like an earlier one: brightness apart, at 16 x 16 pixels."""
        small = Preprocess(size_px=_LOOK_PX)
        found: list[Path] = []
        looks = np.empty((len(self.files), 3 * _LOOK_PX**2), np.float32)
        for file in track(self.files, "calibrate: compare images", len(self.files)):
            look = small.resize(_read(file)).astype(np.float32).ravel()
            look -= look.mean()
            distances = np.sqrt(((looks[: len(found)] - look) ** 2).mean(axis=1))
            if (distances > _LEAST_DIFFERENCE).all() and (found or look.any()):
                looks[len(found)] = look
                found.append(file)
        return tuple(found)


def open_calibration(
    folder: Path,
    inputs: Sequence[GraphInput],
    preprocess: Preprocess | None,
    asked: Mapping[str, Sequence[tuple[int, ...]]],
) -> Calibration:
    """The images of a folder, with the preprocessing that fits the model's only input.

    Args:
        folder: Searched with its subfolders, in the order of the paths.
        inputs: The model's.
        preprocess: How an image becomes an input; None: ImageNet's mean and deviation at the input's size.
        asked: The shapes that the model is to be run at, by input name; empty for any.

    Raises:
        UserError: no images, a model whose input is no picture, or images of a shape that it is not run at.
    """
    files = tuple(sorted(f for f in folder.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file()))
    if not files:
        raise UserError(
            f"calibration folder {folder} holds no images",
            allowed=f"{RECOMMENDED_IMAGES} to 1000 real images ({', '.join(sorted(SUFFIXES))})",
            next_step="name a folder of images from the scene, neither trained on nor tested on",
        )
    name = inputs[0].name if inputs else ""
    fitting = (preprocess or _fitting(inputs[0].dims)) if _is_picture(inputs) else None
    if fitting is None:
        raise UserError(
            f"inputs {', '.join(f'{g.name}{list(g.dims)}' for g in inputs) or 'none'}",
            allowed="one float32 input [N, 3, S, S] or [N, S, S, 3] for --calibration",
            next_step="convert without --calibration, or export the model with one square image input",
        )
    run_at = [shapes[name] for shapes in explicit_shapes(inputs, asked)] if asked else [inputs[0].dims]
    if not any(_fits(fitting, dims) for dims in run_at):
        raise UserError(
            f"calibration images as inputs of [N, {', '.join(map(str, fitting.input_shape[1:]))}]",
            allowed=f"the shape that the model is run at: {' or '.join(str(list(dims)) for dims in run_at)}",
            next_step="give --preprocess with the `size_px` and `layout` of the input, or another --shape",
        )
    return Calibration(files=files, input_name=name, preprocess=fitting)


def _is_picture(inputs: Sequence[GraphInput]) -> bool:
    """Whether the only input can be a batch of images."""
    return len(inputs) == 1 and len(inputs[0].dims) == 4 and inputs[0].dtype == "float32"


def _fits(preprocess: Preprocess, dims: Sequence[int | str]) -> bool:
    """Whether its images have these extents, the batch apart; a string stands for any."""
    pairs = zip(dims[1:], preprocess.input_shape[1:], strict=True)
    return all(isinstance(dim, str) or dim == extent for dim, extent in pairs)


def _fitting(dims: Sequence[int | str], default_px: int = 224) -> Preprocess | None:
    sides = {d for d in (dims[2:] if dims[1] == 3 else dims[1:3]) if isinstance(d, int)}
    if len(sides) > 1 or 3 not in (dims[1], dims[3]):
        return None
    layout: Layout = "NCHW" if dims[1] == 3 else "NHWC"
    return Preprocess(size_px=sides.pop() if sides else default_px, layout=layout)


def _read(file: Path) -> npt.NDArray[np.uint8]:
    decoded = decode(file.read_bytes())
    if isinstance(decoded, Decoded):
        return decoded.image
    raise UserError(
        f"calibration image {file}: {decoded.reason}",
        allowed="images that open",
        next_step="remove the file from the calibration folder",
    )


def read_preprocess(path: Path) -> Preprocess:
    """The preprocess record in a JSON file that a user gave.

    Raises:
        UserError: no file, no JSON, or no such record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise TypeError(f"a {type(record).__name__} instead of a record")  # noqa: TRY301
        record = record.get("preprocess", record)  # a whole model card will do
        known = {field.name for field in fields(Preprocess)}
        if set(record) - known or "size_px" not in record:
            raise KeyError(f"the fields {sorted(record)}")  # noqa: TRY301
        return Preprocess(**{key: _checked(key, value) for key, value in record.items()})
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _unusable_record(path, f"{type(error).__name__} {error}") from error
    except UserError as error:
        raise _unusable_record(path, error.got) from error


def _checked(key: str, value: Any) -> Any:
    """A field's value as `Preprocess` has it; JSON knows neither tuples nor a difference of 224 and 224.0."""
    if key == "size_px":
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"size_px {value!r}")
        return value
    if key in {"mean", "std"}:
        numbers = tuple(float(number) for number in value if not isinstance(number, bool | str))
        if len(numbers) != len(value) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{key} {value!r}")
        return numbers
    if not isinstance(value, str):
        raise TypeError(f"{key} {value!r}")
    return value


def _unusable_record(path: Path, what: str) -> UserError:
    shown = what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."
    return UserError(
        f"preprocess record {path}: {shown}",
        allowed='{"size_px": 1..4096} and, where the defaults are wrong, interpolation area or bilinear,'
        " color_order RGB or BGR, mean and std of three numbers, layout NCHW or NHWC, dtype float32",
        next_step=f"correct {path}, or take the record `preprocess` of a model card",
    )
