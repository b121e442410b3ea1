"""Checkpoints: a rebuildable architecture, a state dict, what the numbers mean. Never a pickled module."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.nn.arch import Architecture
from tasks.variants import Precision, Variant

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A trained model as data."""

    architecture: Architecture
    state: dict[str, torch.Tensor]
    preprocess: Preprocess
    labels: tuple[str, ...]
    pruned_percent: int = 0
    float_layers: tuple[str, ...] | None = None
    """None for a float model. Of a quantised one the layers that stay float; `state` then is that of the
    fake-quant graph, see tasks.nn.quantized."""

    def build(self) -> nn.Module:
        """The float model in eval mode with its weights loaded."""
        assert self.float_layers is None, "a quantised checkpoint is built by tasks.nn.quantized"
        model = self.architecture.build()
        model.load_state_dict(self.state)
        return model.eval()

    def variant(self, precision: Precision) -> Variant:
        """The variant this checkpoint becomes at `precision`."""
        return Variant(
            architecture=self.architecture.name,
            pruned_percent=self.pruned_percent,
            precision=precision,
            size_px=self.preprocess.size_px,
        )

    def save(self, path: Path) -> None:
        """Write the checkpoint; the same content gives the same bytes."""
        record: dict[str, Any] = {
            "format": FORMAT,
            "architecture": self.architecture.to_dict(),
            "state": {k: _plain(v) for k, v in self.state.items()},
            "preprocess": self.preprocess.to_dict(),
            "labels": list(self.labels),
            "pruned_percent": self.pruned_percent,
            "float_layers": None if self.float_layers is None else list(self.float_layers),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")
        with temporary.open("wb") as file:  # by handle: a path would put the file's name into the bytes
            torch.save(record, file)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read a checkpoint; foreign pickles are not executed.

        Raises:
            UserError: missing, damaged, or not written by edgeloop.
        """
        try:
            record = torch.load(path, map_location="cpu", weights_only=True)
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']}, not {FORMAT}")  # noqa: TRY301 - one message for all
            return cls(
                architecture=Architecture.from_dict(record["architecture"]),
                state=record["state"],
                preprocess=Preprocess.from_dict(record["preprocess"]),
                labels=tuple(record["labels"]),
                pruned_percent=record["pruned_percent"],
                float_layers=None if record["float_layers"] is None else tuple(record["float_layers"]),
            )
        except (
            OSError,
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            raise UserError(
                f"checkpoint {path}: {error}",
                allowed="a checkpoint written by edgeloop (architecture record and state dict)",
                next_step="run the stage that writes it, or pass a state dict as train.init.file",
            ) from error


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU in C order. contiguous() is not enough: an axis of length 1 keeps whatever stride it
    had, and strides are written to the file.
    """
    return tensor.detach().cpu().reshape(-1).clone().reshape(tensor.shape)
