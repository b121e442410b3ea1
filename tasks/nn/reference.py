"""The torch model that a deployed variant has to agree with."""

from pathlib import Path

from torch import nn

from fleet.device.errors import UserError
from tasks.nn.checkpoint import Checkpoint
from tasks.nn.fakequant import weight_only_int8
from tasks.nn.fold import fold_batch_norms
from tasks.nn.quantized import QuantizedModel
from tasks.variants import Variant


def checkpoint_path(variant: Variant, workspace: Path = Path()) -> Path:
    """The checkpoint that `variant` is exported from."""
    stage = "quantize" if variant.precision == "i8" else "prune" if variant.pruned_percent else "train"
    return workspace / "models" / stage / "checkpoint.pt"


def reference_model(variant: Variant, workspace: Path = Path()) -> nn.Module:
    """The model in torch, eval mode, images float32 [N, 3, H, W] -> logits.

    fp32 and fp16 give the float model (rounding weights to half precision is part of what parity measures);
    w8 the float model with weights rounded as the converter rounds them; i8 the fake-quant graph on
    integers.

    Raises:
        UserError: the checkpoint is missing, or is not that of `variant`.
    """
    path = checkpoint_path(variant, workspace)
    checkpoint = Checkpoint.load(path)
    if checkpoint.variant(variant.precision) != variant:
        raise UserError(
            f"{path} holds {checkpoint.variant(variant.precision).name}",
            allowed=variant.name,
            next_step="run `dvc repro export` so that the exported variants match the checkpoints",
        )
    if variant.precision == "i8":
        return QuantizedModel.from_checkpoint(checkpoint).graph
    model = checkpoint.build()
    return with_int8_weights(model) if variant.precision == "w8" else model


def with_int8_weights(model: nn.Module) -> nn.Module:
    """A folded copy of `model` whose convolution and linear weights are rounded as for weight-only int8."""
    folded = fold_batch_norms(model)
    for module in folded.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data = weight_only_int8(module.weight)
    return folded
