"""From files to labelled entries: class folders, or split lists as the Grocery Store dataset has them."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal

from fleet.device.errors import UserError
from tasks.data.dataset import SplitName
from tasks.data.listing import Entry, Listing, Refusal, group_of, printable
from tasks.data.trees import Tree

SPLIT_FOLDERS: Mapping[str, SplitName] = {
    "train": "train",
    "val": "val",
    "validation": "val",
    "test": "test",
    "calibration": "calibration",
    "field": "field",
    "field_test": "field_test",
}
# Written by operating systems into every folder they show.
_SYSTEM_FILES = {"thumbs.db", "desktop.ini"}

ClassLevel = Literal["fine", "coarse"]
# Columns of classes.csv in the Grocery Store dataset, by level: name, id.
_CLASS_COLUMNS: Mapping[ClassLevel, tuple[str, str]] = {
    "fine": ("Class Name (str)", "Class ID (int)"),
    "coarse": ("Coarse Class Name (str)", "Coarse Class ID (int)"),
}
_ICONIC_COLUMN = "Iconic Image Path (str)"


def class_folders(tree: Tree, group: re.Pattern[str] | None = None) -> Listing:
    """Label by folder: `CLASS/...` or `SPLIT/CLASS/...`, under any number of single wrapping folders.

    Images of the split `field` may lie directly in their split's folder: their class is unknown.

    Raises:
        UserError: the top level mixes split folders and others.
    """
    prefix = _wrapper(tree)
    has_splits = _has_splits(tree, prefix)
    entries, refusals, classes = (
        [],
        list(tree.refusals),
        set(_class_dirs(tree, prefix, has_splits=has_splits)),
    )
    for raw, read in tree.files.items():
        if _is_hidden(raw):
            refusals.append(Refusal(printable(raw), "hidden_file", "written by an operating system"))
            continue
        parts = [printable(part) for part in PurePosixPath(raw.removeprefix(prefix)).parts]
        split = SPLIT_FOLDERS[parts.pop(0)] if has_splits and parts[0] in SPLIT_FOLDERS else None
        if len(parts) < 2 and split != "field":
            refusals.append(Refusal(printable(raw), "outside_class", "lies in no class folder"))
            continue
        label = parts[0] if len(parts) > 1 else None
        classes.update([label] if label else [])
        name = printable(raw)
        entries.append(Entry(name=name, read=read, label=label, split=split, group=group_of(name, group)))
    return Listing(entries, refusals, tuple(sorted(classes)))


def _is_hidden(raw: str) -> bool:
    parts = PurePosixPath(raw).parts
    return (
        any(part.startswith(".") or part == "__MACOSX" for part in parts)
        or parts[-1].lower() in _SYSTEM_FILES
    )


def _wrapper(tree: Tree) -> str:
    """`a/b/` when everything lies in a/b; a folder that is a split or holds images directly wraps nothing."""
    visible = [PurePosixPath(path).parts for path in (*tree.files, *tree.folders) if not _is_hidden(path)]
    depth, prefix = 0, ""
    while True:
        tops = {parts[depth] for parts in visible if len(parts) > depth}
        top = next(iter(tops), "")
        holds_folders = any(folder.startswith(f"{prefix}{top}/") for folder in tree.folders)
        if len(tops) != 1 or top in SPLIT_FOLDERS or not holds_folders:
            return prefix
        depth, prefix = depth + 1, f"{prefix}{top}/"


def _has_splits(tree: Tree, prefix: str) -> bool:
    tops = {f.removeprefix(prefix).split("/")[0] for f in tree.folders if f.startswith(prefix)} - {""}
    tops = {top for top in tops if not _is_hidden(top)}
    if "train" not in tops:
        return False
    others = sorted(tops - set(SPLIT_FOLDERS))
    if others and len(tops) - len(others) > 1:
        raise UserError(
            f"{tree.origin}: split folders beside others: {', '.join(map(printable, others[:5]))}",
            allowed=f"only split folders ({', '.join(SPLIT_FOLDERS)}), or only class folders",
            next_step="move the other folders away",
        )
    return not others


def _class_dirs(tree: Tree, prefix: str, *, has_splits: bool) -> Iterator[str]:
    depth = 2 if has_splits else 1
    for folder in tree.folders:
        parts = PurePosixPath(folder.removeprefix(prefix)).parts
        if folder.startswith(prefix) and len(parts) == depth and not _is_hidden(folder):
            yield printable(parts[-1])


def split_lists(
    tree: Tree, *, level: ClassLevel, iconic: bool, group: re.Pattern[str] | None = None
) -> Listing:
    """Label by `train.txt`, `val.txt`, `test.txt` (lines `path, fine id, coarse id`) and `classes.csv`.

    Source: github.com/marcusklasson/GroceryStoreDataset.

    Args:
        tree: Where the lists and the images are.
        level: Which of the two ids is the label.
        iconic: Take each class's product picture from classes.csv as images of the split `field`.
        group: First parenthesis = the group, searched in the image's path.

    Raises:
        UserError: train.txt or classes.csv is missing or cannot be read.
    """
    classes, pictures = _read_classes(tree, level)
    entries, refusals = [], list(tree.refusals)
    rows = [*_list_rows(tree, refusals, 1 if level == "fine" else 2)]
    rows += [("classes.csv", path, label, "field") for path, label in pictures] if iconic else []
    for where, path, label_id, split in rows:
        raw = path.lstrip("/")
        if label_id not in classes:
            refusals.append(Refusal(printable(path), "bad_line", f"{where}: no class has the id {label_id}"))
        elif raw not in tree.files:
            refusals.append(Refusal(printable(path), "missing_file", f"{where}: the source has no such file"))
        else:
            name = printable(raw)
            entries.append(
                Entry(
                    name=name,
                    read=tree.files[raw],
                    label=classes[label_id],
                    split=split,
                    group=group_of(name, group),
                )
            )
    order = {path: position for position, path in enumerate(map(printable, tree.files))}
    entries.sort(key=lambda entry: order[entry.name])
    return Listing(entries, refusals, tuple(classes[key] for key in sorted(classes)))


def _list_rows(
    tree: Tree, refusals: list[Refusal], id_column: int
) -> Iterator[tuple[str, str, int, SplitName]]:
    for list_name, split in ((f"{name}.txt", split) for name, split in SPLIT_FOLDERS.items()):
        if list_name not in tree.files and split != "train":
            continue
        for number, row in enumerate(_csv(tree, list_name), start=1):
            if not row:
                continue
            where = f"{list_name} line {number}"
            try:
                yield where, row[0], int(row[id_column]), split
            except (IndexError, ValueError):
                refusals.append(
                    Refusal(printable(", ".join(row)), "bad_line", f"{where}: not `path, fine id, coarse id`")
                )


def _read_classes(tree: Tree, level: ClassLevel) -> tuple[dict[int, str], list[tuple[str, int]]]:
    name_column, id_column = _CLASS_COLUMNS[level]
    header, *rows = _csv(tree, "classes.csv") or [[]]
    try:
        name_at, id_at = header.index(name_column), header.index(id_column)
        icon_at = header.index(_ICONIC_COLUMN)
        names = {int(row[id_at]): printable(row[name_at]) for row in rows if row}
        return names, [(row[icon_at], int(row[id_at])) for row in rows if row]
    except (ValueError, IndexError) as error:
        raise UserError(
            f"{tree.origin}, classes.csv: {error}",
            allowed=f"columns {name_column}, {id_column}, {_ICONIC_COLUMN}, a whole number as id",
            next_step="take classes.csv as the Grocery Store dataset has it",
        ) from error


def _csv(tree: Tree, name: str) -> list[list[str]]:
    read: Callable[[], bytes] | None = tree.files.get(name)
    if read is None:
        raise UserError(
            f"{tree.origin} has no {name}",
            allowed="a folder or tar archive with train.txt, val.txt, test.txt and classes.csv",
            next_step="for class folders set prepare.source.kind to folder or tar",
        )
    try:
        text = read().decode("utf-8-sig")
        return list(csv.reader(io.StringIO(text), skipinitialspace=True, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{tree.origin}, {name}: {error}",
            allowed="UTF-8 text, values separated by commas",
            next_step=f"mend {name}",
        ) from error
