"""The model that a preprocessing is held against: found, opened in a child first, its card weighed."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Layout, Preprocess
from fleet.lab.child import run_child
from tasks.provenance import sha256_of
from tasks.workspace import CODE, Workspace

_OPEN_LIMIT_S = 120.0
_LAST_LINES = 5
_USUAL_PX = 224
# Somebody's file may crash the engine: the first to open and run it is a process of its own.
_OPEN = """
import json, sys
import numpy as np
from fleet.device.engine import Session
from fleet.device.errors import EdgeloopError

def look(path, size_px):
    with Session(path) as session:
        inputs = {name: [spec.dtype, list(spec.shape)] for name, spec in session.inputs.items()}
        if len(inputs) != 1:
            return {"inputs": inputs, "output": []}
        (name, (dtype, shape)), = inputs.items()
        usual = [1, size_px, size_px, 3] if shape[-1:] == [3] else [1, 3, size_px, size_px]
        if len(shape) != 4 or dtype not in ("float32", "unknown"):
            return {"inputs": inputs, "output": []}
        shape = [extent if extent > 0 else other for extent, other in zip(shape, usual)]
        outputs = session.run({name: np.zeros(shape, np.float32)})
        return {"inputs": {name: ["float32", shape]}, "output": list(next(iter(outputs.values())).shape)}

try:
    print(json.dumps(look(sys.argv[1], int(sys.argv[2]))))
except EdgeloopError as error:
    print(json.dumps({"error": str(error)}))
"""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model card says, as far as it can be read."""

    path: Path
    preprocess: Preprocess | None
    labels: tuple[str, ...] | None
    doubt: str
    """Why it is not believed to be this model's; empty when it is."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """An MNN classifier of pictures."""

    path: Path
    size_px: int
    layout: Layout
    """Of its input's shape."""
    classes_count: int
    card: Card | None

    @property
    def trained(self) -> Preprocess | None:
        """What it was trained with, where that is known for sure."""
        return self.card.preprocess if self.card and not self.card.doubt else None


def find_model(workspace: Workspace, given: str | None) -> Path:
    """The .mnn file meant by `given`: a path, a variant of the workspace, or nothing for its best variant.

    Raises:
        UserError: there is none.
    """
    variants = sorted((workspace.path / "models" / "mnn").glob("*/model.mnn"))
    names = [path.parent.name for path in variants]
    if given is None and variants:
        return _best(workspace, variants)
    if given is not None:
        path = Path(given)
        if given in names and not path.is_file():
            return variants[names.index(given)]
        path = path / "model.mnn" if path.is_dir() else path
        if path.is_file():
            return path
    raise UserError(
        f"model {given}" if given else f"no model in {workspace.path / 'models' / 'mnn'}",
        allowed=f"an .mnn file, or a variant of workspace {workspace.name}: {', '.join(names) or 'none yet'}",
        next_step="build the workspace with `edgeloop build`, or name a file: `--model MODEL.mnn`",
    )


def _best(workspace: Workspace, variants: list[Path]) -> Path:
    """The most accurate on the test set, of equal ones the smallest; the first where nothing was measured."""
    try:
        parity = json.loads((workspace.path / "reports" / "parity.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        parity = {}
    return max(variants, key=lambda path: (parity.get(f"{path.parent.name}/top1", 0), -path.stat().st_size))


def open_model(path: Path, record: Preprocess | None) -> Model:
    """Open a model, look at its input and its card.

    Args:
        path: The .mnn file.
        record: What an input of any size is run with.

    Raises:
        UserError: its only input is no colour picture, or its first output no list of classes.
        EngineError: the engine does not open or run it.
    """
    card = read_card(path)
    guess = record or (card.preprocess if card else None)
    size_px = guess.size_px if guess else _USUAL_PX
    ended = run_child(
        [sys.executable, "-c", _OPEN, str(path.absolute()), str(size_px)],
        timeout_s=_OPEN_LIMIT_S,
        cwd=CODE,
    )
    if ended.failure:
        last = "\n".join(ended.said.strip().splitlines()[-_LAST_LINES:])
        raise EngineError(f"{path}: opening and running it {ended.failure}", engine_said=last)
    seen = json.loads(ended.stdout.strip().splitlines()[-1])
    if "error" in seen:
        raise EngineError(f"{path} cannot be used: {seen['error']}")
    shape, layout = _picture_input(path, seen["inputs"])
    if len(seen["output"]) != 2 or seen["output"][0] != 1 or seen["output"][1] < 2:
        raise UserError(
            f"{path}: its first output has the shape {seen['output']}",
            allowed="a classifier: one score for each of two or more classes, [1, K]",
            next_step="diagnose the preprocessing with a classifier",
        )
    return Model(path=path, size_px=shape[2], layout=layout, classes_count=int(seen["output"][1]), card=card)


def _picture_input(path: Path, inputs: Mapping[str, tuple[str, list[int]]]) -> tuple[list[int], Layout]:
    for dtype, shape in inputs.values():
        if len(inputs) == 1 and len(shape) == 4 and shape[0] == 1 and dtype == "float32":
            if shape[1] == 3 and shape[2] == shape[3]:
                return shape, "NCHW"
            if shape[3] == 3 and shape[1] == shape[2]:
                return shape, "NHWC"
    seen = ", ".join(f"{name}: {dtype} {shape}" for name, (dtype, shape) in inputs.items())
    raise UserError(
        f"{path}: inputs {seen}",
        allowed="one float32 input [1, 3, S, S] or [1, S, S, 3]: a square colour picture",
        next_step="diagnose the preprocessing with a model of that kind",
    )


def read_card(path: Path) -> Card | None:
    """The card beside the model; None when there is none."""
    place = path.with_name("card.json")
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return Card(path=place, preprocess=None, labels=None, doubt=f"it cannot be read: {error}")
    return _read_card(place, record, sha256_of(path))


def _read_card(place: Path, record: Any, sha256: str) -> Card:
    if not isinstance(record, dict):
        return Card(path=place, preprocess=None, labels=None, doubt="it is no record")
    doubt = "" if record.get("mnn_sha256") == sha256 else "it describes other bytes than this file's"
    try:
        preprocess = Preprocess.from_dict(record["preprocess"])
    except (UserError, KeyError, TypeError, AttributeError) as error:
        preprocess, doubt = None, f"its record `preprocess` cannot be used: {error}".splitlines()[0]
    labels: Any = record.get("labels")
    named = isinstance(labels, list) and bool(labels) and all(isinstance(name, str) for name in labels)
    return Card(path=place, preprocess=preprocess, labels=tuple(labels) if named else None, doubt=doubt)
