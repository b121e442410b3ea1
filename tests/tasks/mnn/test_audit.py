"""The audit: a model that is not what was asked is refused with the reason, before or after conversion."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversion_models import (
    conv_weight,
    layer,
    node,
    two_conv_layers,
    two_convs,
    write_compression,
    write_model,
)

from fleet.device.errors import EngineError, UserError
from tasks.mnn.audit import audit, expected_size_bytes
from tasks.mnn.converter import ConvertOptions, convert, dump
from tasks.mnn.graph import MnnGraph
from tasks.mnn.source import Source, read_source

CASES = Path(__file__).resolve().parents[3] / ".." / "shared" / "cases"


def _net(path: Path, kind: str, seed: int) -> tuple[Path, list[dict[str, Any]]]:
    """A layer of one kind between a ReLU and a Neg, with int8 asked for it; names depend on the seed."""
    rng = np.random.default_rng(seed)
    out, inside = 4 + 4 * seed, 4
    weight, extra, tensor = conv_weight(rng, out, inside), {}, f"layer{seed}/out"
    kind_of, channels, last = "Conv", out, [node("Neg", [tensor], "y")]
    changes: dict[str, Any] = {}
    if kind == "deconv":
        kind_of, weight = "ConvTranspose", conv_weight(rng, inside, out)
    elif kind == "grouped":
        weight, extra = conv_weight(rng, out, 2), {"group": 2}
    elif kind == "depth multiplier":
        out = channels = 8 + 4 * seed
        weight, extra = conv_weight(rng, out, 1), {"group": 4}
    elif kind == "ends graph":
        tensor, last = "y", []
    elif kind in {"nan", "inf", "zero", "negative"}:
        bad = {"nan": float("nan"), "inf": float("inf"), "zero": 0.0, "negative": -0.1}[kind]
        changes = [{"input": bad}, {"output": bad}, {"weight": [0.01] * (out - 1) + [bad]}][seed % 3]
    elif kind == "per tensor":
        channels = 1
    elif kind == "too many scales":
        channels = out + 1
    nodes = [node("Relu", ["x"], "r"), node(kind_of, ["r", "w"], tensor, kernel_shape=[3, 3], **extra), *last]
    write_model(path, nodes, {"w": weight}, inputs={"x": [1, inside, 9 + seed, 9]}, outputs=["y"])
    asked = "another/name" if kind == "unknown name" else tensor
    records = [layer(asked, channels, **changes)] * (2 if kind == "twice" else 1)
    return path, records


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("deconv", "is a ConvTranspose.*stay float"),
        ("grouped", "grouped Conv"),
        ("depth multiplier", "grouped Conv"),
        ("ends graph", "ends the graph"),
        ("unknown name", "'another/name' is no tensor"),
        ("nan", "not finite and positive"),
        ("inf", "not finite and positive"),
        ("zero", "not finite and positive"),
        ("negative", "not finite and positive"),
        ("per tensor", "1 weight scales for"),
        ("too many scales", "weight scales for"),
        ("twice", "listed 2 times"),
    ],
)
def test_int8_that_would_stay_float_or_crash_is_refused(
    kind: str, reason: str, seed: int, tmp_path: Path
) -> None:
    """The engine ignores these silently or crashes; here the reason names the layer and no file appears."""
    onnx, records = _net(tmp_path / "m.onnx", kind, seed)
    parameters = write_compression(tmp_path / "q.json", records)
    with pytest.raises(EngineError, match=reason):
        convert(onnx, tmp_path / "m.mnn", ConvertOptions(compression=parameters))
    assert not (tmp_path / "m.mnn").exists()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_layer_without_the_fault_becomes_int8(seed: int, tmp_path: Path) -> None:
    """The control of the refusals above: a plain convolution under the same names passes."""
    onnx, records = _net(tmp_path / "m.onnx", "plain", seed)
    parameters = write_compression(tmp_path / "q.json", records)
    result = convert(onnx, tmp_path / "m.mnn", ConvertOptions(compression=parameters))
    assert result.audit.int8_layers == (f"layer{seed}/out",)
    assert result.int8_ops_ran is not None
    assert result.int8_ops_ran > 0


def test_a_layer_named_before_its_fusion_is_found_float(tmp_path: Path) -> None:
    """Only the graph tells: the tensor exists in the ONNX, the converter knows the layer by its ReLU."""
    onnx = two_convs(tmp_path / "m.onnx")
    parameters = write_compression(tmp_path / "q.json", [layer("conv1", 8)])
    with pytest.raises(EngineError, match=r"'conv1'.*stayed float"):
        convert(onnx, tmp_path / "m.mnn", ConvertOptions(compression=parameters))


def test_two_scales_for_one_tensor_are_refused(tmp_path: Path) -> None:
    """A layer that reads a tensor with another scale than it was written with is not what was asked."""
    onnx, records = two_convs(tmp_path / "m.onnx"), two_conv_layers()
    records[1]["input"][0]["scales"] = [0.05]
    parameters = write_compression(tmp_path / "q.json", records)
    with pytest.raises(EngineError, match="'relu1' has the scale"):
        convert(onnx, tmp_path / "m.mnn", ConvertOptions(compression=parameters))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"algo": []}',
        '{"algo": [{}]}',
        '{"algo": [{"quantParams": {"layer": [{"input": []}]}}]}',
        "\x00\xff",
    ],
)
def test_parameters_that_are_none_are_a_user_error(content: str, tmp_path: Path) -> None:
    """The file is named with what is wrong in it."""
    parameters = tmp_path / "q.json"
    parameters.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"q\.json"):
        convert(two_convs(tmp_path / "m.onnx"), tmp_path / "m.mnn", ConvertOptions(compression=parameters))


def test_four_bits_are_a_user_error(tmp_path: Path) -> None:
    """The converter takes bits=4 and writes 8: what cannot be given is not accepted."""
    parameters = write_compression(tmp_path / "q.json", [layer("relu1", 8, bits=4)])
    with pytest.raises(UserError, match="has 4 bits"):
        convert(two_convs(tmp_path / "m.onnx"), tmp_path / "m.mnn", ConvertOptions(compression=parameters))


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, MnnGraph, int]:
    """A model converted as fp32: its source, its graph and its size."""
    folder = tmp_path_factory.mktemp("float")
    result = convert(two_convs(folder / "m.onnx", width=32), folder / "m.mnn")
    return read_source(folder / "m.onnx"), dump(result.path), result.size_bytes


def test_the_audit_finds_a_float_model_where_int8_was_asked(
    float_model: tuple[Source, MnnGraph, int], tmp_path: Path
) -> None:
    """A model that the converter left float fails for every layer asked, and for its size."""
    parameters = write_compression(tmp_path / "q.json", two_conv_layers(32))
    source, graph, size_bytes = float_model
    found = audit(source, graph, size_bytes, ConvertOptions(compression=parameters))
    assert not found.ok
    assert [reason.split(":")[0] for reason in found.reasons[:2]] == [
        "int8 layer 'relu1' stayed float",
        "int8 layer 'clip2' stayed float",
    ]


@pytest.mark.parametrize(("asked", "count"), [({"fp16": True}, 3), ({"weight_bits": 8}, 3), ({}, 0)])
def test_the_audit_finds_weights_of_another_width(
    asked: dict[str, Any], count: int, float_model: tuple[Source, MnnGraph, int]
) -> None:
    """float32 weights where half or int8 was asked are named layer by layer."""
    found = audit(*float_model, ConvertOptions(**asked))
    assert sum("has float32 weights" in reason for reason in found.reasons) == count
    assert found.ok == (count == 0)


def test_the_audit_finds_int8_nobody_asked_for(tmp_path: Path) -> None:
    """An int8 layer that is not in the parameters is a fault as well."""
    onnx = two_convs(tmp_path / "m.onnx")
    both = write_compression(tmp_path / "q.json", two_conv_layers())
    result = convert(onnx, tmp_path / "m.mnn", ConvertOptions(compression=both))
    one = write_compression(tmp_path / "one.json", two_conv_layers()[:1])
    source, graph = read_source(onnx), dump(result.path)
    found = audit(source, graph, result.size_bytes, ConvertOptions(compression=one))
    assert any("'clip2' is int8 although nothing asked" in reason for reason in found.reasons)


def test_a_model_larger_than_its_constants_fails(float_model: tuple[Source, MnnGraph, int]) -> None:
    """The limit is the constants at the bits asked for, plus a margin for names and attributes."""
    source, graph, size_bytes = float_model
    assert expected_size_bytes(source, ConvertOptions()) == 4 * (32 * 27 + 32 * 9 + 5 * 32 + 2)
    found = audit(source, graph, 3 * size_bytes + 20_000, ConvertOptions())
    assert any("bytes, its constants" in reason for reason in found.reasons)


@pytest.mark.parametrize("kind", ["BatchNorm", "ReLU"])
def test_a_fusion_that_did_not_happen_is_found(kind: str, float_model: tuple[Source, MnnGraph, int]) -> None:
    """A batch norm or ReLU left behind a convolution is named."""
    source, graph, size_bytes = float_model
    conv = next(op for op in graph.ops if op.weight_type)
    left = replace(
        conv, name="left", type=kind, inputs=conv.outputs, outputs=("z",), weight_type=None, attributes={}
    )
    rest = [replace(op, inputs=("z",)) if op.inputs == conv.outputs else op for op in graph.ops]
    found = audit(source, replace(graph, ops=(*rest, left)), size_bytes, ConvertOptions())
    assert f"{kind} 'left' was not fused into the convolution before it" in found.reasons


def test_the_operator_lists_are_compared(float_model: tuple[Source, MnnGraph, int]) -> None:
    """What was fused is absorbed, what the engine needs for its layout is added."""
    found = audit(*float_model, ConvertOptions())
    assert found.onnx_ops == {"Clip": 1, "Conv": 3, "Relu": 1}
    assert found.absorbed == {"Clip": 1, "Relu": 1}
    assert found.added == {"ConvertTensor": 2}
    assert found.ops == {"ConvertTensor": 2, "Convolution": 2, "ConvolutionDepthwise": 1}
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True


def _scaled(rng: np.random.Generator, factor: float) -> Callable[[Path], Path]:
    def build(path: Path) -> Path:
        weight = conv_weight(rng, 6, 3) * np.float32(factor)
        nodes = [node("Conv", ["x", "w"], "c"), node("Mul", ["c", "s"], "y")]
        constants = {"w": weight, "s": np.float32(1 / factor).reshape(())}
        return write_model(path, nodes, constants, inputs={"x": [1, 3, 7, 7]}, outputs=["y"])

    return build


@pytest.mark.parametrize(("factor", "lost"), [(1e-9, "'w'"), (3e-7, "'w'"), (1e6, "'w'"), (1e-5, "'s'")])
def test_half_precision_that_loses_the_weights_is_refused(factor: float, lost: str, tmp_path: Path) -> None:
    """Below float16's subnormals or above its maximum, in the weights or in what scales them back."""
    onnx = _scaled(np.random.default_rng(0), factor)(tmp_path / "m.onnx")
    with pytest.raises(EngineError, match=f"float16 loses .*{lost}"):
        convert(onnx, tmp_path / "m.mnn", ConvertOptions(fp16=True))
    assert convert(onnx, tmp_path / "m.mnn").audit.ok


def test_half_precision_sees_the_weights_with_the_batch_norm_folded(tmp_path: Path) -> None:
    """Tiny weights that a batch norm scales up are harmless: the converter folds before it rounds."""
    rng, channels = np.random.default_rng(0), 6
    one, zero = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    constants = {"w": conv_weight(rng, channels, 3) * np.float32(1e-8), "g": one * 1e8, "z": zero, "o": one}
    nodes = [
        node("Conv", ["x", "w"], "c"),
        node("BatchNormalization", ["c", "g", "z", "z", "o"], "b"),
        node("Relu", ["b"], "y"),
    ]
    onnx = write_model(tmp_path / "m.onnx", nodes, constants, inputs={"x": [1, 3, 7, 7]}, outputs=["y"])
    found = convert(onnx, tmp_path / "m.mnn", ConvertOptions(fp16=True)).audit
    assert found.weights == {"float16": 1}
    assert found.absorbed == {"BatchNormalization": 1, "Relu": 1}


REFUSED = {
    "cast_uint8": "SIGSEGV",
    "conv3d_no_kernel_shape": "0 operators|cannot build|no operator",
    "domain_same_op_name": "foreign domains",
    "ex_bn_train": "training mode",
    "fp16_flag_tiny_weight": "float16 loses",
    "groupnorm_op21": "GroupNormalization",
    "if_data_condition": "cannot run",
    "int8_deconv": "ConvTranspose",
    "int8_layer_ends_graph": "ends the graph",
    "int8_per_tensor": "1 weight scales",
    "int8_unknown_names": "is no tensor",
    "lstm_reverse": "cannot run",
    "maxpool_dilated": "has the shape",
    "qdq_conv_uint8": "complained",
    "qdq_depthwise": "has the shape",
    "resize_axes": "has the shape",
    "resize_3d_trilinear": "crashed with SIG|cannot build",
}
PASSED = ("clip_max_only", "groupnorm_torch_pattern", "names_slash_colon", "split_c2f")


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared fault cases are not here")
@pytest.mark.parametrize("name", [*REFUSED, *PASSED])
def test_published_faults_that_the_graph_or_the_converter_shows(name: str, tmp_path: Path) -> None:
    """Faults after public reports are refused with their reason; the controls beside them convert."""
    case, out = CASES / name, tmp_path / "m.mnn"
    arguments = json.loads((case / "case.json").read_text(encoding="utf-8"))["convert_args"]
    parameters = case / "compress.json"
    options = ConvertOptions(
        fp16="--fp16" in arguments, compression=parameters if parameters.exists() else None
    )
    if name in PASSED:
        assert convert(case / "model.onnx", out, options).path.is_file()
        return
    with pytest.raises(EngineError, match=REFUSED[name]):
        convert(case / "model.onnx", out, options)
    assert not out.exists()
