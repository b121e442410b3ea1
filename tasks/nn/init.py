"""Initial weights: a state dict from a file or torchvision's, checked against the model, never executed."""

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from torch import nn

from fleet.device.errors import UserError
from tasks.nn.arch import BUILD_OPTIONS
from tasks.stage import Params


class InitFile(Params):
    """A file to start from."""

    file: Path
    """A state dict (`torch.save(model.state_dict(), file)`) or an edgeloop checkpoint."""
    sha256: str
    """SHA-256 of the file (`sha256sum FILE`): DVC sees this parameter, not the file."""


@dataclass(frozen=True)
class Loaded:
    """What became of the tensors of a state dict."""

    loaded_count: int
    fresh_count: int
    """Tensors of the classifier that kept their fresh values because the number of classes differs."""


def read_state(source: InitFile) -> dict[str, torch.Tensor]:
    """Read a state dict without running code from it.

    Raises:
        UserError: missing, not the file the hash names, or not a state dict.
    """
    try:
        content = source.file.read_bytes()
        record = torch.load(source.file, map_location="cpu", weights_only=True)
        state = record.get("state", record)
        if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise TypeError("it holds other things than tensors")  # noqa: TRY301 - joins the errors of torch.load
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        raise UserError(
            f"initial weights {source.file}: {error}",
            allowed="a state dict (name -> tensor) or an edgeloop checkpoint; pickled modules are not loaded",
            next_step="save `model.state_dict()`, or set train.init: none",
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if source.sha256 != digest:
        raise UserError(
            f"initial weights {source.file} with SHA-256 {digest}",
            allowed=f"the file with SHA-256 {source.sha256}",
            next_step="restore the file, or set train.init.sha256 to the new hash",
        )
    return dict(state)


def torchvision_state(architecture: str) -> dict[str, torch.Tensor]:
    """Torchvision's pretrained weights; the only step of a build that wants a network.

    Raises:
        UserError: torchvision has none for this architecture, or they cannot be downloaded.
    """
    try:
        model: nn.Module = torchvision.models.get_model(
            architecture, weights="DEFAULT", **BUILD_OPTIONS.get(architecture, {})
        )
    except (OSError, RuntimeError, ValueError) as error:  # no network, a damaged download, no such model
        raise UserError(
            f"torchvision's weights for {architecture}: {error}",
            allowed="a machine that reaches download.pytorch.org, or weights torchvision has cached before",
            next_step="set train.init: none, or fetch a state dict elsewhere and name it as train.init.file",
        ) from error
    return model.state_dict()


def load_matching(model: nn.Module, state: Mapping[str, torch.Tensor], *, origin: str) -> Loaded:
    """Load `state` into `model`; only a classifier for another number of classes may differ and stays fresh.

    Args:
        model: The model to fill, in place.
        state: Name -> tensor.
        origin: Names the source in errors.

    Raises:
        UserError: names or shapes differ anywhere else: a partly loaded model would quietly train to less.
    """
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    different = [name for name in own if name in state and own[name].shape != state[name].shape]
    head = {f"{_classifier_name(model)}.{kind}" for kind in ("weight", "bias")}
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in different
        if name not in head or own[name].shape[1:] != state[name].shape[1:]
    ]
    if missing or unknown or wrong:
        problems = [*(f"{n} missing" for n in missing), *(f"{n} unknown" for n in unknown), *wrong]
        raise UserError(
            f"initial weights {origin}: {len(problems)} tensors do not fit, e.g. {'; '.join(problems[:3])}",
            allowed="the tensors of train.architecture; only the classifier's number of classes may differ",
            next_step="set train.architecture and train.activation to what the weights were trained with",
        )
    model.load_state_dict({k: v for k, v in state.items() if k not in different}, strict=False)
    return Loaded(loaded_count=len(own) - len(different), fresh_count=len(different))


def _classifier_name(model: nn.Module) -> str:
    """The layer that gives the logits: the last linear or convolution in definition order."""
    layers: list[str] = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    return layers[-1]
