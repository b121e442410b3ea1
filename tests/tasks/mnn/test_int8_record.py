"""Compression parameters: one writer with its floors, one reader, and the activation a layer is named by."""

import json

import numpy as np
import pytest
from onnx import helper
from onnx_graphs import graph, node, weights

from fleet.device.errors import UserError
from tasks.mnn.int8_record import Int8Layer, fused_activation, int8_layers, parameters
from tasks.mnn.source import Source

LAYER = Int8Layer(
    input="a", weight="w", output="b", input_scale=0.5, output_scale=0.25, weight_scales=(0.1, 0.2)
)


def test_what_is_written_is_read_back(tmp_path):
    """Names and scales survive, and the integers are those of the fake-quantised training."""
    (tmp_path / "c.json").write_text(json.dumps(parameters([LAYER])))
    assert int8_layers(tmp_path / "c.json") == (LAYER,)
    record = parameters([LAYER])["algo"][0]["quantParams"]["layer"][0]
    assert {(side[0]["bits"], side[0]["clampMin"], side[0]["clampMax"]) for side in record.values()} == {
        (8, -127, 127)
    }


def test_scales_have_one_floor():
    """A dead channel gets 1/4096 of its layer's largest scale, a tensor that is always zero 1e-7."""
    dead = Int8Layer(
        input="a", weight="w", output="b", input_scale=0.0, output_scale=1.0, weight_scales=(0.0, 4.096)
    )
    record = parameters([dead])["algo"][0]["quantParams"]["layer"][0]
    assert record["weight"][0]["scales"] == [0.001, 4.096]
    assert record["input"][0]["scales"] == [1e-7]


_SIDES = {"bits": 8, "scales": [1.0], "name": "t"}
MALFORMED = {
    "no JSON": "{",
    "a list": "[1, 2]",
    "a number": "3",
    "no algorithm": "{}",
    "algorithms that are a number": '{"algo": 3}',
    "a layer that is text": '{"algo": [{"quantParams": {"layer": ["conv1"]}}]}',
    "no layers": '{"algo": []}',
    "too deep": "[" * 100_000,
    "a huge number of bits": json.dumps(
        {"algo": [{"quantParams": {"layer": [{"input": [{**_SIDES, "bits": 10**400}]}]}}]}
    ),
    "a scale beyond floats": json.dumps(
        {
            "algo": [
                {
                    "quantParams": {
                        "layer": [
                            {
                                "input": [{**_SIDES, "scales": [10**400]}],
                                "weight": [_SIDES],
                                "output": [_SIDES],
                            }
                        ]
                    }
                }
            ]
        }
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_a_user_error_with_a_next_step(kind, tmp_path):
    """Whatever the JSON is, the error names the file, what is allowed, and what a user can do."""
    path = tmp_path / "c.json"
    path.write_text(MALFORMED[kind])
    with pytest.raises(UserError, match=r"c\.json") as caught:
        int8_layers(path)
    assert "dvc" not in caught.value.next_step


def _constant(name, **value):
    return helper.make_node("Constant", [], [name], **value)


CLIPS = {
    "operator set 7: attributes": (7, [node("Clip", "t", "u", min=0.0, max=6.0)], {}, True),
    "operator set 10: other limits": (10, [node("Clip", "t", "u", min=0.0, max=1.0)], {}, False),
    "operator set 10: no maximum": (10, [node("Clip", "t", "u", min=0.0)], {}, False),
    "initialisers": (
        13,
        [node("Clip", "t lo hi", "u")],
        {"lo": np.float32(0), "hi": np.float32(6)},
        True,
    ),
    "Constant nodes, one of a plain float": (
        13,
        [
            _constant("lo", value_float=0.0),
            _constant("hi", value=helper.make_tensor("v", 1, [], [6.0])),
            node("Clip", "t lo hi", "u"),
        ],
        {},
        True,
    ),
    "no minimum": (13, [node("Clip", "t _ hi", "u")], {"hi": np.float32(6)}, False),
}


@pytest.mark.parametrize("kind", CLIPS)
def test_relu6_is_found_however_it_is_written(kind):
    """Limits are attributes, initialisers or Constant nodes, as the operator set has it."""
    opset, nodes, constants, fused = CLIPS[kind]
    conv = node("Conv", "x w", "t", kernel_shape=[3, 3])
    model = graph(
        [conv, *nodes, node("Neg", "u", "y")],
        [("x", [1, 3, 8, 8])],
        [("y", [1, 4, 6, 6])],
        {"w": weights(4, 3, 3, 3), **constants},
        opset=opset,
    )
    found = fused_activation(Source(name="", model=model, sha256=""), conv)
    assert (found is not None) is fused
