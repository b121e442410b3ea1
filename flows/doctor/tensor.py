"""`edgeloop doctor --preprocess IMAGE --tensor FILE`: what an app did, read off the input it made."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from flows.doctor.finding import Finding
from flows.doctor.model import find_model, read_card
from flows.doctor.table import print_findings
from tasks.mnn.calibration import read_preprocess
from tasks.mnn.preprocess_explain import Explanation, explain
from tasks.workspace import Workspace


def run(
    workspace: Workspace,
    image: Path,
    tensor: Path,
    *,
    model: str | None,
    record: Path | None,
    as_json: bool,
) -> int:
    """Print what the app did differently; returns the exit code: 2 when something is, else 0.

    Args:
        workspace: Whose best variant is taken when no model is named.
        image: The picture the app was given.
        tensor: What it fed the model with, [1, 3, S, S] or [1, S, S, 3], as .npy.
        model: An .mnn file or a variant of the workspace; its card says how it was trained.
        record: What the input should be, as JSON; None: as the card says.
        as_json: Print the finding as JSON.

    Raises:
        UserError: a file cannot be used, or nothing says what the input should be.
    """
    claimed, whose = _claimed(workspace, model, record)
    finding = _finding(explain(_tensor(tensor), _picture(image), claimed), tensor, whose)
    if as_json:
        print(json.dumps({"ok": finding.status != "problem", "findings": [asdict(finding)]}, indent=1))
    else:
        print_findings([finding])
    return 2 if finding.status == "problem" else 0


def _claimed(workspace: Workspace, model: str | None, record: Path | None) -> tuple[Preprocess, str]:
    """What the input should be, and who says so."""
    if record is not None:
        return read_preprocess(record), str(record)
    path = find_model(workspace, model)
    card = read_card(path)
    if card is None or card.preprocess is None:
        raise UserError(
            f"{path}: {card.doubt if card else 'no card.json beside it'}",
            allowed="a model whose card says how it was trained, or a record",
            next_step="say what the input should be: `--record preprocess.json`",
        )
    return card.preprocess, str(card.path)


def _tensor(path: Path) -> npt.NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"--tensor {path}: {' '.join(str(error).split())[:120]}",
            allowed="the model's input as NumPy writes it, .npy",
            next_step="dump it where the app hands it to the engine: `numpy.save`",
        ) from error
    if not isinstance(loaded, np.ndarray):
        raise UserError(
            f"--tensor {path}: an archive of several arrays",
            allowed="one array, .npy",
            next_step="`numpy.save` the model's input alone",
        )
    return loaded


def _picture(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"--preprocess {path}: {error.strerror}",
            allowed="with `--tensor`: the image that the tensor was made of",
            next_step="name that image file",
        ) from error


def _finding(found: Explanation, tensor: Path, whose: str) -> Finding:
    if not found.reproduced:
        return Finding(
            check="tensor",
            status="warning",
            found=f"{tensor}: {found}",
            next_step="see that it was made of this very image, as it lies there, and by one inference",
        )
    if not found.mismatches:
        return Finding(check="tensor", status="ok", found=f"{tensor} is what {whose} says: {found}")
    return Finding(
        check="tensor",
        status="problem",
        found=f"{tensor} is not what {whose} says: {found}",
        next_step="do these steps in the app as the record says; it names what the app did first",
    )
