"""Image files made in memory for the tests of the data stations, and small models for those that measure."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fleet.device.preprocess import Preprocess


def make_pixels(seed: int, width: int = 40, height: int = 30) -> np.ndarray:
    """uint8 RGB [H, W, 3], smooth enough for JPEG, different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR))


def make_file(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def make_class_folder(root: Path, classes: int = 3, images: int = 20, *, seed: int = 0) -> Path:
    """root/class_C/IMAGE.png, every image different."""
    for label in range(classes):
        folder = root / f"class_{label}"
        folder.mkdir(parents=True)
        for number in range(images):
            file = make_file(make_pixels(seed + label * images + number))
            (folder / f"{number:03d}.png").write_bytes(file)
    return root


@pytest.fixture(scope="session")
def pixels() -> Callable[..., np.ndarray]:
    """`make_pixels`."""
    return make_pixels


@pytest.fixture(scope="session")
def image_file() -> Callable[..., bytes]:
    """`make_file`."""
    return make_file


@pytest.fixture(scope="session")
def class_folder() -> Callable[..., Path]:
    """`make_class_folder`."""
    return make_class_folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Two classifiers of 16 px images; the second has four times the channels."""
    import torch
    from torch import nn

    from tasks.mnn.converter import convert
    from tasks.mnn.onnx_export import export_onnx

    folder, files = tmp_path_factory.mktemp("models"), []
    for name, channels in (("small", 8), ("large", 32)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).eval()
        model(torch.zeros(1, 3, 16, 16))
        export_onnx(model, Preprocess(size_px=16), folder / f"{name}.onnx")
        convert(folder / f"{name}.onnx", folder / f"{name}.mnn")
        files.append(folder / f"{name}.mnn")
    return files
