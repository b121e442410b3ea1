"""The shared fault cases, as they come and mutated: never accepted and wrong, controls never refused."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_graphs import mutated, save

from tasks.mnn.any_onnx import AnyConversion, convert_any
from tasks.mnn.onnx_compare import compare_output
from tasks.mnn.onnx_runs import Planned, run_plan
from tasks.mnn.request import ConvertOptions

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"
NAMES = [p.name for p in sorted(CASES.glob("*")) if p.is_dir() and not p.name.startswith("pr_")]
pytestmark = pytest.mark.skipif(not NAMES, reason="the shared cases are not beside the repository")

# A word of the operator, layer or kind that a refusal must name; cases that a rewrite makes right have none.
NAMED = {
    "add_broadcast_channel_last": "Add",
    "cast_uint8": "UINT8",
    "deconv_output_shape": "output_shape",
    "ex_bn_train": "without eval()",
    "ex_interpolate_baked_size": "baked in",
    "ex_view_baked_batch": "baked in",
    "fp16_flag_tiny_weight": "float16",
    "gelu_tanh_pattern_scaled": "Tanh",
    "gridsample_reflection": "GridSample",
    "groupnorm_op21": "GroupNormalization",
    "if_data_condition": "If",
    "int8_deconv": "ConvTranspose",
    "int8_layer_ends_graph": "ends the graph",
    "int8_per_tensor": "weight scales for 8",
    "int8_unknown_names": "no tensor that the model computes",
    "lstm_reverse": "LSTM",
    "maxpool_dilated": "dilations=[2, 2]",
    "pad_negative": "Pad",
    "qdq_conv_uint8": "QuantizeLinear",
    "qdq_depthwise": "QuantizeLinear",
    "resize_3d_trilinear": "Resize",
    "resize_axes": "axes",
    "resize_linear_antialias": "antialias",
    "scatter_elements_add": "reduction=add",
    "topk_ties": "TopK",
    "where_else_broadcast": "Where",
}


@dataclass
class Outcome:
    case: dict[str, Any]
    result: AnyConversion
    feeds: list[dict[str, np.ndarray]]
    want: list[Mapping[str, np.ndarray]]
    model: Path


def _run(name: str, folder: Path, *, mutate: bool) -> Outcome:
    source = CASES / name
    case = json.loads((source / "case.json").read_text())
    compression = source / "compress.json" if (source / "compress.json").exists() else None
    options = ConvertOptions(fp16="--fp16" in case["convert_args"], compression=compression)
    model, feeds, want = source / "model.onnx", [], []
    for run in case["runs"]:
        feeds.append(dict(np.load(source / run["inputs"])))
        want.append(dict(np.load(source / run["expected"])))
    if mutate:
        changed = mutated(onnx.load(model), seed=7)
        names = [
            i.name for i in changed.graph.input if i.name not in {t.name for t in changed.graph.initializer}
        ]
        model = save(changed, folder / f"{name}-mutated.onnx")
        feeds = [dict(zip(names, f.values(), strict=True)) for f in feeds]
        want = [
            d.outputs or {} for d in run_plan("reference", model, [Planned(f) for f in feeds], timeout_s=60)
        ]
    out = folder / f"{name}{'-mutated' * mutate}.mnn"
    return Outcome(case, convert_any(model, out, options=options), feeds, want, out)


def _run_all(names: list[str], folder: Path, *, mutate: bool) -> dict[str, Outcome]:
    with ThreadPoolExecutor(2) as pool:  # each conversion waits for its child processes
        outcomes = pool.map(lambda name: _run(name, folder, mutate=mutate), names)
        return dict(zip(names, outcomes, strict=True))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return _run_all(NAMES, tmp_path_factory.mktemp("cases"), mutate=False)


# One of each way to fail or pass; compression parameters name tensors, so those graphs cannot be renamed.
MUTABLE = [
    name
    for name in (
        "add_broadcast_channel_last",
        "cast_uint8",
        "conv3d_no_kernel_shape",
        "deconv_output_shape",
        "domain_same_op_name",
        "ex_bn_train",
        "ex_interpolate_baked_size",
        "ex_view_baked_batch",
        "gelu_tanh_pattern_scaled",
        "groupnorm_torch_pattern",
        "maxpool_dilated",
        "opset_custom_domain_first",
        "qdq_depthwise",
        "resize_3d_trilinear",
        "scatter_elements_add",
        "split_c2f",
        "topk_ties",
        "where_else_broadcast",
    )
    if name in NAMES
]


@pytest.fixture(scope="module")
def mutations(tmp_path_factory):
    return _run_all(MUTABLE, tmp_path_factory.mktemp("mutations"), mutate=True)


def _assert_right(outcome: Outcome) -> None:
    """What was accepted computes the case's own inputs as the reference does, in one session."""
    done = run_plan(
        "engine", outcome.model, [Planned(f, i == 0) for i, f in enumerate(outcome.feeds)], timeout_s=60
    )
    for one, want in zip(done, outcome.want, strict=True):
        assert want
        assert one.outputs is not None, one.error
        for tensor, value in want.items():
            error = compare_output(one.outputs[tensor], value, plain=True).max_rel_error
            assert error < outcome.case["tolerance"], tensor


@pytest.mark.parametrize("name", NAMES)
def test_a_case_is_refused_by_name_or_right_on_its_own_inputs(outcomes, name):
    """Refusals leave no file and name the cause; controls are accepted; nothing accepted is wrong."""
    outcome = outcomes[name]
    result = outcome.result
    assert result.ok == outcome.model.exists()
    if outcome.case["guard"] == "parity":
        assert result.ok, result.reason
    if result.ok:
        _assert_right(outcome)
    else:
        assert NAMED[name] in result.reason


@pytest.mark.parametrize("name", MUTABLE)
def test_renamed_reseeded_and_wrapped_cases_are_judged_as_well(outcomes, mutations, name):
    """Other names, weights and surrounding layers make no control fail, and nothing accepted is wrong.

    Some faults vanish behind another layer: the converter crashes on a Cast of the graph's input only.
    """
    mutation = mutations[name]
    assert mutation.result.ok == mutation.model.exists()
    if outcomes[name].result.ok:
        assert mutation.result.ok, mutation.result.reason
    if mutation.result.ok:
        _assert_right(mutation)
    else:
        assert mutation.result.reason


def test_accepted_rewrites_say_what_was_rewritten(outcomes):
    """A model that only became right by a rewrite carries a sentence about it."""
    assert "inlined" in outcomes["domain_same_op_name"].result.reason
    assert "ai.onnx before" in outcomes["opset_custom_domain_first"].result.reason
