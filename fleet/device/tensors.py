"""Arrays in and out of MNN: what a tensor declares, values that fit into it, and copies in the ONNX's order.

An array of another element type would be copied as garbage, and a tensor's own buffer read directly is packed
garbage too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.device.errors import EngineError, UserError
from fleet.device.native import MNN

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One model input or output as the engine declares it."""

    name: str
    shape: tuple[int, ...]
    """Axis order as in the ONNX graph; -1 where the engine does not know the extent."""
    dtype: str
    """numpy name: float32, int32, int64, uint8, int8."""


_HALIDE = {
    "float32": MNN.Halide_Type_Float,
    "float64": MNN.Halide_Type_Double,
    "int32": MNN.Halide_Type_Int,
    "int64": MNN.Halide_Type_Int64,
    "uint8": MNN.Halide_Type_Uint8,
}


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """What the engine declares of an input or output."""
    shape = tuple(int(n) for n in tensor.getShape())
    known = all(n > 0 for n in shape)
    # Only the dtype is read from the tensor's own buffer: its values lie in a packed layout.
    return TensorSpec(name=name, shape=shape, dtype=str(tensor.getNumpyData().dtype) if known else "unknown")


def copy_in(name: str, tensor: Any, array: Array, dtype: str) -> None:
    """Copy an array into an input tensor of the element type `dtype`, narrowed where its values fit.

    MNN declares int32 for ONNX's int64 and bool, and float32 for its other floats.

    Raises:
        UserError: an array of another kind, or values that `dtype` cannot hold.
    """
    declared = array if array.dtype == dtype else _narrowed(name, array, dtype)
    content = np.ascontiguousarray(declared)
    tensor.copyFrom(MNN.Tensor(array.shape, _HALIDE[dtype], content, MNN.Tensor_DimensionType_Caffe))


def _narrowed(name: str, array: Array, dtype: str) -> Array:
    kinds = {"f": "float", "i": "int", "u": "int", "b": "int"}
    if kinds.get(array.dtype.kind) != kinds[np.dtype(dtype).kind] or not _fits(array, dtype):
        raise UserError(
            f"input {name} with dtype {array.dtype}",
            allowed=f"{dtype}, or values of the same kind that fit into it",
            next_step="cast the input",
        )
    return array.astype(dtype)


def _fits(array: Array, dtype: str) -> bool:
    if array.size == 0:
        return True
    if array.dtype.kind == "f":  # a wider float may round, but no number may become infinite
        largest = np.abs(array, where=np.isfinite(array), out=np.zeros_like(array)).max()
        return bool(largest <= np.finfo(dtype).max)
    limits = np.iinfo(dtype)
    return bool(int(array.min()) >= limits.min and int(array.max()) <= limits.max)


def copy_out(tensor: Any) -> Array:
    """Copy a tensor out in the ONNX axis order; reading its buffer directly gives packed garbage."""
    shape = tuple(int(n) for n in tensor.getShape())
    if any(n < 0 for n in shape):
        raise EngineError(f"the engine left an output with shape {shape}")
    dtype = str(tensor.getNumpyData().dtype) if 0 not in shape else "float32"
    if dtype == "int8":  # a quantised intermediate: ask for it as float, MNN dequantises while copying
        dtype = "float32"
    buffer = np.zeros(shape, dtype)
    host = MNN.Tensor(shape, _HALIDE[dtype], buffer, MNN.Tensor_DimensionType_Caffe)
    if not tensor.copyToHostTensor(host):
        raise EngineError("the engine could not copy an output to the host")
    return np.array(host.getNumpyData()).reshape(shape)
