"""The MNN interpreter behind one class: opened, checked, run, traced and always released.

MNN fails quietly: a session that could not be built still hands out its unset buffers, an input of another
element type is copied as garbage, an absent backend is replaced by the CPU. So `Session` asks the engine what
really happened and raises instead of answering.
"""

import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np

from fleet.device.errors import EngineError, UserError
from fleet.device.native import ENGINE_VERSION, MNN, quiet_stdout
from fleet.device.tensors import Array, TensorSpec, copy_in, copy_out, spec_of

__all__ = [
    "ENGINE_VERSION",
    "Array",
    "OpRun",
    "RuntimeConfig",
    "Session",
    "TensorSpec",
    "quiet_stdout",
]

Level = Literal["low", "normal", "high"]
Backend = Literal["CPU", "OPENCL", "VULKAN", "METAL"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How a session runs; bound to a release as its config version."""

    backend: Backend = "CPU"
    threads: int = 1
    precision: Level = "normal"
    """low allows fp16 arithmetic where the CPU has it; normal and high compute in fp32."""
    memory: Level = "normal"
    """low computes weight-only int8 layers without unpacking them to fp32."""

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("backend", self.backend, get_args(Backend)),
            ("precision", self.precision, get_args(Level)),
            ("memory", self.memory, get_args(Level)),
        ):
            if value not in allowed:
                raise UserError(
                    f"runtime config {field} = {value!r}",
                    allowed=", ".join(allowed),
                    next_step=f"set {field} to one of these",
                )
        if self.threads < 1:
            raise UserError(
                f"runtime config threads = {self.threads}", allowed="1 or more", next_step="set threads to 1"
            )

    def to_dict(self) -> dict[str, str | int]:
        """A JSON-able record."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class OpRun:
    """One operator that executed."""

    name: str
    type: str
    """Operator type without the engine's marks, e.g. Convolution, BinaryOp, Raster."""
    int8: bool
    """Whether the engine marked it as computing in int8."""
    duration_ms: float
    work_m: float = 0.0
    """Millions of multiply-accumulates, for operators without any of elements, as the engine counts them."""


# MNN's SessionInfoCode, and what it answers for the last two: an int whose bits come back as a float.
_SESSION_MEMORY_MB, _SESSION_BACKEND, _SESSION_STATUS = 0, 2, 3
_READY = 0
_BACKENDS = {0: "CPU", 13: "CPU", 1: "METAL", 3: "OPENCL", 7: "VULKAN"}  # MNNForwardType; 13: CPU with SIMD


class Session:
    """An MNN model opened for inference; use as a context manager.

    Raises:
        UserError: the file is missing, or feeds do not match the inputs.
        EngineError: the engine cannot open, build or run the model.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        config: RuntimeConfig | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Open `path`; `shapes` fixes dynamic inputs before the session is used."""
        self.path, self.config = Path(path), config or RuntimeConfig()
        if not self.path.is_file() or self.path.stat().st_size == 0:
            raise UserError(
                f"model file {self.path} is missing or empty",
                allowed="an .mnn file",
                next_step="build it with `edgeloop build` or `edgeloop convert`",
            )
        settings = {
            "backend": self.config.backend,
            "numThread": self.config.threads,
            "precision": self.config.precision,
            "memory": self.config.memory,
        }
        self._dtypes: dict[str, str] = {}
        with quiet_stdout():
            try:
                self._interpreter: Any = MNN.Interpreter(str(self.path))
                self._session: Any = self._interpreter.createSession(settings)
            except Exception as error:  # MNN raises bare Exception
                raise EngineError(
                    f"{self.path.name} does not open in MNN {ENGINE_VERSION}", engine_said=str(error)
                ) from error
        if self._session is None:
            raise EngineError(f"{self.path.name}: MNN {ENGINE_VERSION} built no session")
        backend = self._interpreter.getSessionInfo(self._session, _SESSION_BACKEND)
        if _BACKENDS.get(backend) != self.config.backend:
            raise EngineError(
                f"{self.path.name}: MNN {ENGINE_VERSION} has no {self.config.backend} here "
                f"and fell back to {_BACKENDS.get(backend, f'backend {backend}')}"
            )
        if shapes:
            self.resize(shapes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the session and the interpreter; safe to call twice."""
        self._session = None
        self._interpreter = None

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """Input names to their specs, in the engine's order."""
        return {k: spec_of(k, t) for k, t in self._input_tensors().items()}

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """Output names to their specs, in the engine's order; shapes are known after a run."""
        return {k: spec_of(k, t) for k, t in self._engine.getSessionOutputAll(self._session).items()}

    @property
    def memory_mb(self) -> float:
        """Memory the session holds, in MiB, as the engine counts it."""
        return float(self._engine.getSessionInfo(self._session, _SESSION_MEMORY_MB))

    def resize(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give inputs new shapes and rebuild the session's buffers.

        Raises:
            UserError: the model has no such input, or an extent is not positive.
            EngineError: the engine cannot build the model for these shapes.
        """
        tensors = self._input_tensors()
        for name, shape in shapes.items():
            if name not in tensors:
                raise self._wrong_inputs(set(shapes))
            if any(extent < 1 for extent in shape):
                raise UserError(
                    f"input {name} with shape {tuple(shape)} for {self.path.name}",
                    allowed="positive extents",
                    next_step="give the input a shape with at least one element",
                )
        with quiet_stdout():
            for name, shape in shapes.items():
                if tuple(tensors[name].getShape()) != tuple(shape):
                    self._engine.resizeTensor(tensors[name], tuple(shape))
            self._engine.resizeSession(self._session)
        self._require_built()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One inference.

        Args:
            feeds: Every input by name, C-contiguous or not, axis order as in the ONNX graph.

        Returns:
            Every output by name, copied out of the engine.
        """
        self._feed(feeds)
        code: int = self._engine.runSession(self._session)
        if code != 0:
            raise EngineError(f"{self.path.name}: inference failed with MNN code {code}")
        return self._read_outputs()

    def trace(self, feeds: Mapping[str, Array]) -> tuple[dict[str, Array], list[OpRun]]:
        """One inference that also lists the operators that executed, in order; slower than `run`."""
        outputs, ops, _ = self._traced(feeds, keep=None)
        return outputs, ops

    def intermediates(self, feeds: Mapping[str, Array], keep: set[str]) -> dict[str, Array]:
        """First output of each operator named in `keep` (float32), for finding the first diverging layer."""
        return self._traced(feeds, keep=keep)[2]

    def _traced(
        self, feeds: Mapping[str, Array], *, keep: set[str] | None
    ) -> tuple[dict[str, Array], list[OpRun], dict[str, Array]]:
        self._feed(feeds)
        ops: list[OpRun] = []
        kept: dict[str, Array] = {}
        started = 0.0

        def before(_tensors: Any, _info: Any) -> bool:
            nonlocal started
            started = time.perf_counter()
            return True

        def after(tensors: Any, info: Any) -> bool:
            elapsed_ms = (time.perf_counter() - started) * 1e3
            kind = str(info.getType())
            name = str(info.getName())
            plain_kind = kind.partition("[")[0].strip()
            ops.append(
                OpRun(
                    name=name,
                    type=plain_kind,
                    int8="DT_INT8" in kind,
                    duration_ms=elapsed_ms,
                    work_m=float(info.getFlops()),
                )
            )
            if keep is not None and name in keep and tensors:
                kept[name] = copy_out(tensors[0])
            return True

        code = self._engine.runSessionWithCallBackInfo(self._session, before, after)
        if code != 0 or not ops:
            raise EngineError(
                f"{self.path.name}: inference failed with MNN code {code} after {len(ops)} operators"
            )
        return self._read_outputs(), ops, kept

    @property
    def _engine(self) -> Any:
        if self._interpreter is None:
            raise EngineError(f"{self.path.name}: the session is closed")
        return self._interpreter

    def _feed(self, feeds: Mapping[str, Array]) -> None:
        tensors = self._input_tensors()
        if set(feeds) != set(tensors):
            raise self._wrong_inputs(set(feeds))
        arrays = {name: np.asarray(value) for name, value in feeds.items()}
        self._resize_if_needed({name: array.shape for name, array in arrays.items()})
        if not self._dtypes:
            self._require_built()
            self._dtypes = {name: str(tensor.getNumpyData().dtype) for name, tensor in tensors.items()}
        for name, array in arrays.items():
            copy_in(name, tensors[name], array, self._dtypes[name])

    def _resize_if_needed(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Resize only when a shape differs: an unchanged session keeps its buffers."""
        tensors = self._input_tensors()
        if any(tuple(tensors[k].getShape()) != tuple(s) for k, s in shapes.items()):
            self.resize(shapes)

    def _input_tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = self._engine.getSessionInputAll(self._session)
        return tensors

    def _require_built(self) -> None:
        """Refuse a session whose shapes did not work out: nothing would ever be written to its buffers."""
        status = self._engine.getSessionInfo(self._session, _SESSION_STATUS)
        if struct.unpack("i", struct.pack("f", status))[0] != _READY:
            shapes = {name: tuple(t.getShape()) for name, t in self._input_tensors().items()}
            raise EngineError(f"{self.path.name}: MNN {ENGINE_VERSION} cannot build it for inputs {shapes}")

    def _read_outputs(self) -> dict[str, Array]:
        outputs = {k: copy_out(t) for k, t in self._engine.getSessionOutputAll(self._session).items()}
        if all(output.size == 0 for output in outputs.values()):
            shapes = {name: output.shape for name, output in outputs.items()}
            raise EngineError(f"{self.path.name}: every output came back empty: {shapes}")
        return outputs

    def _wrong_inputs(self, got: set[str]) -> UserError:
        return UserError(
            f"inputs {sorted(got)} for {self.path.name}",
            allowed=f"exactly {sorted(self._input_tensors())}",
            next_step="name the inputs as the model does",
        )
