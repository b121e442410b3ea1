"""From a torch model to the ONNX file MNN's converter reads: batch norms folded, batch 1, deterministic."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from torch import nn

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from tasks.nn.fold import fold_batch_norms

OPSET = 17
_LARGEST_BYTES = 2**31 - 2**20  # of the weights; the graph itself takes the rest


def export_onnx(
    model: nn.Module,
    preprocess: Preprocess,
    path: Path,
    *,
    input_name: str = "input",
    output_name: str = "logits",
) -> None:
    """Write `model` as ONNX for one image at a time.

    The batch is fixed at 1: the engine plans its memory for the shape it will see on a device, and a symbolic
    batch adds shape arithmetic that it may not fold away. The TorchScript exporter is used because it names
    initialisers after modules (`features.0.0.weight`), by which scales find their layers.

    Args:
        model: A float classifier in eval mode, [N, 3, H, W] -> [N, num_classes]; it is not changed.
        preprocess: Gives the input shape.
        path: The file to write; its folder is created.
        input_name: Name of the graph's input.
        output_name: Name of the graph's output.

    Raises:
        UserError: the model is in training mode, too large or cannot be traced, or the layout is not torch's.
        EngineError: the exporter failed or wrote a graph that the ONNX checker refuses.
    """
    _check(model, preprocess)
    folded = fold_batch_norms(model).requires_grad_(requires_grad=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        with warnings.catch_warnings(), _exporter_settings():
            warnings.simplefilter("ignore")  # the exporter's deprecation and tracer notes, on every call
            torch.onnx.export(
                folded,
                (torch.zeros(preprocess.input_shape),),
                str(temporary),
                dynamo=False,
                opset_version=OPSET,
                input_names=[input_name],
                output_names=[output_name],
            )
        onnx.checker.check_model(str(temporary), full_check=True)
    except (
        torch.onnx.errors.OnnxExporterError,
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
    ) as error:
        raise EngineError(
            f"{type(model).__name__} does not export to ONNX opset {OPSET}", engine_said=str(error)
        ) from error
    temporary.replace(path)


def _check(model: nn.Module, preprocess: Preprocess) -> None:
    """Refuse what no graph for a torch model can be written of."""
    if preprocess.layout != "NCHW":
        raise UserError(
            f"preprocess.layout = {preprocess.layout!r} for a torch model",
            allowed="NCHW",
            next_step="set preprocess.layout to NCHW; the engine repacks tensors on its own",
        )
    size_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size_bytes > _LARGEST_BYTES:
        raise UserError(
            f"{type(model).__name__} with {size_bytes / 1e9:.1f} GB of weights",
            allowed="less than 2 GB, the limit of one protobuf file",
            next_step="choose a smaller architecture",
        )


@contextlib.contextmanager
def _exporter_settings() -> Iterator[None]:
    """No log lines on stderr (errors still raise), and attention as operators that ONNX has."""
    logger = logging.getLogger("torch.onnx")
    level, fast_attention = logger.level, torch.backends.mha.get_fastpath_enabled()
    logger.setLevel(logging.ERROR)
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        yield
    finally:
        logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(value=fast_attention)
