"""What became of a conversion, for people: the JSON of `edgeloop convert --json` is for programs."""

import shlex
from collections.abc import Iterator

from tasks.mnn.any_onnx import AnyConversion
from tasks.mnn.onnx_axes import as_text
from tasks.mnn.onnx_layers import Layers
from tasks.mnn.onnx_parity import Parity

_STORED = {"int8": "int8 weights", "float16": "fp16 weights", "float32": "fp32 weights"}


def summary(result: AnyConversion) -> str:
    """A few lines: what was made, what is in it, how it was proven, what is not, what comes next."""
    return "\n".join(_made(result) if result.ok else _refused(result))


def _made(result: AnyConversion) -> Iterator[str]:
    if result.size_bytes is None or result.layers is None or result.parity is None:
        raise ValueError(f"a conversion without its proof: {result}")
    size, before = result.size_bytes, result.source_bytes
    yield f"wrote {result.output}: {_size(size)}, {size / before:.0%} of the ONNX's {_size(before)}"
    yield from _layer_lines(result.layers)
    yield from _parity_lines(result.parity)
    if result.notes:
        yield "to know:"
        yield from (f"  - {note}" for note in result.notes)
    yield 'not proven: what docs/own-model.md names under "What the proof does not cover"'
    if result.parity.tolerance.lossy:
        yield "next: count its top-1 on your own test set"
    yield f"next: measure it on this host: edgeloop bench {shlex.quote(str(result.output))}"


def _layer_lines(layers: Layers) -> Iterator[str]:
    count = sum(layers.storage.values())
    stored = ", ".join(f"{n} with {_STORED[kind]}" for kind, n in layers.storage.items())
    yield f"operators: {layers.ops_count}" + (
        f", {layers.int8_ops_ran} computed in int8 when it ran" if layers.int8_ops_ran else ""
    )
    yield f"layers with weights: {count}" + (f" ({stored})" if stored else "")
    if layers.int8_count:
        yield f"  int8: {layers.int8_count}"
    by_reason: dict[tuple[str, str], list[str]] = {}
    for layer in layers.floats:
        by_reason.setdefault((layer.op, layer.why), []).append(layer.name)
    for (op, why), names in by_reason.items():
        yield f"  float: {len(names)} {op}, because {why}: {', '.join(names)}"
    if count and not layers.int8_count:
        yield "  all compute in float"


def _parity_lines(parity: Parity) -> Iterator[str]:
    shapes = "; ".join(as_text(shapes) for shapes in parity.shapes)
    yield f"proven against ONNX Runtime: {parity.runs} runs at {shapes}"
    tolerance = parity.tolerance
    least = f" (at least {tolerance.min_cosine:g})" if tolerance.lossy and tolerance.min_cosine > 0 else ""
    error, allowed = parity.max_rel_error, tolerance.max_rel_error
    yield f"  largest error {error:.2g} of an output's range (at most {allowed:.2g})"
    yield f"  least cosine {parity.min_cosine:.6f}{least}"


def _refused(result: AnyConversion) -> Iterator[str]:
    yield f"refused: {result.source}; nothing was written"
    yield f"why: {result.reason}"
    if result.unsupported:
        yield f"at fault: {', '.join(result.unsupported)}"
    yield "next: docs/own-model.md says what is tried, how to export, and what an option changes"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:.1f} kB"
