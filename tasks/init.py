"""`edgeloop init NAME DIR`: a workspace for someone's own images, with parameters that fit them."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from fleet.device.errors import UserError
from tasks.champion import write_champion
from tasks.champion_files import FOLDER
from tasks.data.decode import Decoded, decode
from tasks.data.forecast import Forecast, forecast
from tasks.data.hashable import check_hashable
from tasks.data.listing import Listing
from tasks.data.splits import CalibrationParams
from tasks.gate import GateParams
from tasks.prepare import FolderSource, TarSource, list_source
from tasks.provenance import sha256_of
from tasks.workspace import Workspace, workspaces

_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_SIZES_PX = (32, 48, 64, 96, 128, 160, 192, 224)
"""Multiples of 16 up to the size the architectures were made for."""
_SAMPLE = 200
"""Images looked into to learn how large they are."""
_IMAGES_SEEN = 60_000
"""Images a training should see in all: about 25 minutes at 64 px on two cores."""
_EPOCHS = (5, 60)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found in someone's folder."""

    images_count: int
    classes_count: int
    side_px: int
    """Median of the shorter sides of a sample."""
    forecast: Forecast
    """The splits that come out, and what they allow."""

    @property
    def size_px(self) -> int:
        """The largest usual input that needs no enlarging."""
        return max((size for size in _SIZES_PX if size <= self.side_px), default=_SIZES_PX[0])

    @property
    def epochs(self) -> int:
        """More passes over fewer images, within limits."""
        return int(np.clip(round(_IMAGES_SEEN / self.images_count), *_EPOCHS))


def init_workspace(root: Path, name: str, directory: Path) -> tuple[Workspace, Found]:
    """Write workspaces/NAME into the repository `root`; the images stay where they are.

    Args:
        root: The repository.
        name: Of the workspace, new.
        directory: A folder of CLASS/IMAGE or SPLIT/CLASS/IMAGE, or a tar archive of one.

    Raises:
        UserError: the name cannot be used, DVC cannot hash the folder, or it holds no images of two classes
            or too few for every split.
    """
    _check_name(root, name)
    source = Path(os.path.realpath(directory.expanduser()))  # Path.resolve raises on a link to itself
    kind: Literal["folder", "tar"] = "tar" if source.is_file() else "folder"
    if source == root or root.is_relative_to(source):
        raise UserError(
            f"{source} holds edgeloop itself",
            allowed="a folder that holds images only",
            next_step="name the folder with one folder a class in it",
        )
    check_hashable(source)
    if not source.exists():
        raise UserError(
            f"{source} is not there",
            allowed="a folder of CLASS/IMAGE or SPLIT/CLASS/IMAGE, or a tar of one",
            next_step="name the folder that holds your images: `ls` shows what there is",
        )
    listing = list_source(
        TarSource(kind="tar", path=source) if kind == "tar" else FolderSource(kind="folder", path=source)
    )
    found = look(listing, source)
    folder = root / "workspaces" / name
    folder.mkdir(parents=True)
    try:
        text = _HEAD.format(source=json.dumps(str(source))) + _text(
            parameters(root, kind, source, found), _golden(root)
        )
        (folder / "params.yaml").write_text(text, encoding="utf-8")
        (folder / "dvc.yaml").symlink_to("../../dvc.yaml")
        write_champion(folder / FOLDER)  # nothing has been released yet
    except OSError:
        shutil.rmtree(folder)
        raise
    return Workspace(name=name, path=folder, repository=root), found


_HEAD = """# Images of {source}, read where they lie.
# `edgeloop init` chose by their number and size; what is not said here has the defaults of tasks/STAGE.py.
# What each field means stands beside it in tasks/STAGE.py.
"""


def _check_name(root: Path, name: str) -> None:
    known = workspaces(root)
    taken = name in known or (root / "workspaces" / name).exists()
    if taken or not _NAME.fullmatch(name):
        raise UserError(
            f"workspace name {name!r}" + (" is taken" if taken else ""),
            allowed="a letter, then letters, digits and `-`, all lower case, at most 40; not "
            + ", ".join(known),
            next_step="choose another name" + (f", or remove workspaces/{name}" if taken else ""),
        )


_SAID_OF_THE_FLOOR = """\
# min_top1: the share of test images that every variant has to get right, or the build is refused.
# 0.9 is a guess: choose what the use of the model needs.
"""
_SAID_OF_FEW = """\
# calibration.min_images: {default} by default, for which there are too few images; int8 suffers from fewer.
"""
# A float model of the repository that has seen photographs of many things.
_GENERAL = "models/golden/cifar10-mbv3s-p0-fp32-r64.pt"
_SAID_OF_GOLDEN = """\
  # A small set of photographs lacks general features; the float model of the preset cifar10 has some.
  # It fits the default architecture, mobilenet_v3_small, at any size and with any number of classes.
  # To start from it, remove the `#` of these lines:
#  init:
#    file: ../../{file}
#    sha256: {sha256}
"""


def _text(params: Mapping[str, Any], golden: str) -> str:
    """params.yaml with what a user should know where it applies."""
    said = {"gate": _SAID_OF_THE_FLOOR}
    if "calibration" in params["prepare"]:
        said["prepare"] = _SAID_OF_FEW.format(default=CalibrationParams().min_images)
    below = {"train": golden}
    return "".join(
        said.get(name, "") + yaml.safe_dump({name: value}, sort_keys=False) + below.get(name, "")
        for name, value in params.items()
    )


def _golden(root: Path) -> str:
    """The lines that offer our own weights to start from; empty where they are not there."""
    file = root / _GENERAL
    if not file.is_file():
        return ""
    return _SAID_OF_GOLDEN.format(file=_GENERAL, sha256=sha256_of(file))


# What suits photographs of things; text and digits must not be flipped.
_AUGMENT = {"crop_scale_min": 0.4, "flip": True, "brightness": 0.3, "contrast": 0.3, "saturation": 0.3}


def look(listing: Listing, source: Path) -> Found:
    """Count images and classes, and open some to see how large they are.

    Raises:
        UserError: fewer than two classes have images, too few for every split, or no image of the sample can
            be read.
    """
    labels = {entry.label for entry in listing.entries if entry.label is not None}
    if len(labels) < 2:
        raise UserError(
            f"{source}: {len(listing.entries)} files in {len(labels)} class folders",
            allowed="at least two folders with images, one a class, or train/ and test/ with these inside",
            next_step="put the images of each class into a folder named after it",
        )
    every = max(1, len(listing.entries) // _SAMPLE)
    decoded = []
    for entry in listing.entries[::every]:
        try:
            decoded.append(decode(entry.read()))
        except OSError:  # unreadable now; prepare will refuse it by name and reason
            continue
    sides = [min(d.image.shape[:2]) for d in decoded if isinstance(d, Decoded)]
    if not sides:
        raise UserError(
            f"{source}: none of a sample of {len(listing.entries[::every])} files is a readable image",
            allowed="JPEG, PNG, WebP, BMP, TIFF and the like",
            next_step="convert them, or name another folder",
        )
    return Found(
        images_count=len(listing.entries),
        classes_count=len(labels),
        side_px=int(np.median(sides)),
        forecast=forecast(listing),
    )


def parameters(root: Path, kind: str, source: Path, found: Found) -> dict[str, Any]:
    """The params.yaml of a new workspace: what depends on the images; the rest has defaults."""
    digits: dict[str, Any] = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    params: dict[str, Any] = dict.fromkeys(digits, None)  # the same sections, in the same order
    sections: dict[str, Any] = {name: {} for name in digits if isinstance(digits[name], dict)}
    least = found.forecast.min_calibration_images
    return (
        params
        | sections
        | {
            "root": "../..",
            "devices": digits["devices"],
            "prepare": {"source": {"kind": kind, "path": str(source)}, "stored_size_px": found.size_px}
            | ({} if least is None else {"calibration": {"min_images": least}}),
            "train": {
                "preprocess": {"size_px": found.size_px},
                "epochs": found.epochs,
                "augment": dict(_AUGMENT),
            },
            "prune": {"steps": 2, "epochs": 8, "augment": dict(_AUGMENT)},
            "quantize": {"epochs": 8, "augment": dict(_AUGMENT)},
            "export": digits["export"],
            "gate": {"min_top1": GateParams().min_top1},
        }
    )
