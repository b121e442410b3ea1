"""A folder of somebody's pictures: which can be used, and which class each belongs to."""

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import cv2
import numpy as np

from fleet.device.errors import UserError
from tasks.data.decode import MAX_FILE_BYTES, Unusable, decode
from tasks.progress import track

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif"})
_TRIES_A_PICTURE = 4  # a folder of broken files is given up rather than read to its end
_NAMED = 5  # folders in a message


class Files(Sequence[bytes]):
    """Contents of files, read when asked for: thousands of photographs need not fit into memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> "Files": ...
    def __getitem__(self, index: int | slice) -> "bytes | Files":
        if isinstance(index, slice):
            return Files(self.paths[index])
        return self.paths[index].read_bytes()


@dataclass(frozen=True, kw_only=True)
class PictureFolder:
    """A sample of a folder's usable pictures, each class in turn."""

    pictures: Files
    labels: tuple[int, ...] | None
    """Class index of each picture; None when the folder does not say."""
    found: int
    """Files that have the name of a picture, and a class where any has."""
    skipped: Mapping[str, int]
    """How many files were looked at and left out, by reason."""
    note: str
    """What was assumed about the classes; empty when nothing was."""
    unlabelled_because: str
    """Empty with labels."""
    opencv_decodes: bool
    """Whether OpenCV reads each of them too."""

    @property
    def classes_count(self) -> int:
        """Classes in the sample."""
        return len(set(self.labels or ()))


def read_folder(
    folder: Path, class_names: Sequence[str] | None, classes_count: int, at_most: int
) -> PictureFolder:
    """Sample the pictures below `folder`; the folders they lie in say their classes.

    Args:
        folder: CLASS/IMAGE, at any depth; or images without classes.
        class_names: The model's, in the order of its outputs; None where nobody wrote them down: then the
            folders are class indices, or as many as the model has classes, in alphabetical order.
        classes_count: How many outputs the model has.
        at_most: Pictures in the sample.

    Raises:
        UserError: no folder, or no usable picture in it.
    """
    files = _files(folder)
    places = _classes(folder, files, class_names, classes_count)
    labelled = [file for file in files if file in places.index]
    wanted = labelled or files
    usable, skipped, opencv = _usable(_in_turn(folder, wanted, places.index), at_most)
    if not usable:
        said = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise UserError(
            f"none of the {len(wanted)} image files in {folder} can be used: {said}",
            allowed="photographs that open, as JPEG or PNG",
            next_step="look at one of them in an image viewer, or name another folder",
        )
    if labelled and len(labelled) < len(files):
        skipped["in folders that are no class of the model"] += len(files) - len(labelled)
    return PictureFolder(
        pictures=Files(usable),
        labels=tuple(places.index[file] for file in usable) if labelled else None,
        found=len(wanted),
        skipped=dict(skipped),
        note=places.note,
        unlabelled_because=places.trouble,
        opencv_decodes=opencv,
    )


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(
            f"{folder} is {'no folder' if folder.exists() else 'not there'}",
            allowed="a folder of images, best as CLASS/IMAGE",
            next_step="name the folder that holds the images; unpack an archive first",
        )
    every = [path for path in folder.rglob("*") if path.is_file()]
    files = sorted(path for path in every if path.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(
            f"{folder} holds no images among its {len(every)} files",
            allowed=f"files that end in {', '.join(sorted(SUFFIXES))}",
            next_step="name the folder that holds the images",
        )
    return files


@dataclass(frozen=True, kw_only=True)
class _Places:
    index: Mapping[Path, int]
    note: str = ""
    trouble: str = ""


def _classes(
    folder: Path, files: Sequence[Path], class_names: Sequence[str] | None, classes_count: int
) -> _Places:
    """The class of each file whose folders say it."""
    folders = {file: file.relative_to(folder).parts[:-1] for file in files}
    if not any(folders.values()):
        return _Places(index={}, trouble="the images are not sorted into a folder for each class")
    if class_names is not None:
        known = {name: index for index, name in enumerate(class_names)}
        inner = {
            file: next((p for p in reversed(parts) if p in known), None) for file, parts in folders.items()
        }
        index = {file: known[name] for file, name in inner.items() if name is not None}
        names = sorted({parts[-1] for parts in folders.values() if parts})
        return _Places(
            index=index,
            trouble=""
            if index
            else f"no folder is named as a class of the model: {_some(names)}; it knows {_some(class_names)}",
        )
    names = sorted({parts[-1] for parts in folders.values() if parts})
    if all(name.isascii() and name.isdigit() and int(name) < classes_count for name in names):
        numbers, note = {name: int(name) for name in names}, "folders are taken for class indices"
    elif len(names) == classes_count:
        numbers = {name: index for index, name in enumerate(names)}
        note = "no card names the classes: folders are taken for them in alphabetical order"
    else:
        return _Places(
            index={},
            trouble=f"{len(names)} folders ({_some(names)}), but the model has {classes_count} classes"
            " and no card that names them",
        )
    return _Places(index={f: numbers[parts[-1]] for f, parts in folders.items() if parts}, note=note)


def _in_turn(folder: Path, files: Sequence[Path], index: Mapping[Path, int]) -> Iterator[Path]:
    """One file of each class after another; within a class shuffled, the same way each time."""
    groups: dict[int, list[Path]] = defaultdict(list)
    for file in sorted(files, key=lambda f: hashlib.sha256(bytes(f.relative_to(folder))).digest()):
        groups[index.get(file, -1)].append(file)
    for row in itertools.zip_longest(*(groups[key] for key in sorted(groups))):
        yield from (file for file in row if file is not None)


def _usable(files: Iterator[Path], at_most: int) -> tuple[list[Path], Counter[str], bool]:
    """The first files that open, why others do not, and whether OpenCV opens all of them."""
    usable: list[Path] = []
    skipped: Counter[str] = Counter()
    opencv = True
    for file in track(itertools.islice(files, at_most * _TRIES_A_PICTURE), "open images", at_most):
        reason, opens = _look(file)
        if reason:
            skipped[reason] += 1
            continue
        usable.append(file)
        opencv &= opens
        if len(usable) == at_most:
            break
    return usable, skipped, opencv


def _look(file: Path) -> tuple[str, bool]:
    """Why a file cannot be used, and whether OpenCV opens it."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            return "too_large", False
        data = file.read_bytes()
    except OSError as error:
        return f"unreadable ({error.strerror})", False
    decoded = decode(data)
    if isinstance(decoded, Unusable):
        return decoded.kind, False
    # At an eighth of the size: whether it opens at all.
    return "", cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_REDUCED_COLOR_8) is not None


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
