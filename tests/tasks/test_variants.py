"""Variant names decode and encode."""

import pytest

from fleet.device.errors import UserError
from tasks.variants import Variant


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mbv3s-p30-i8-r224", ("mobilenet_v3_small", 30, "i8", 224)),
        ("rn18-p0-fp32-r64", ("resnet18", 0, "fp32", 64)),
        ("efficientnet_b0-p20-w8-r160", ("efficientnet_b0", 20, "w8", 160)),
    ],
)
def test_names_decode_to_their_parts_and_back(name, fields):
    """Architecture, pruned per cent, precision and input size; the round trip gives the same name."""
    variant = Variant.parse(name)
    assert (variant.architecture, variant.pruned_percent, variant.precision, variant.size_px) == fields
    assert variant.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mbv3s",
        "mbv3s-p30-i4-r224",
        "mbv3s-p30-i8@r224",
        "../x-p0-fp32-r8",
        "mbv3s-p300-i8-r224",
        "a-p0-fp32-r8\n",
    ],
)
def test_anything_else_is_refused(name):
    """Names from outside become paths: only the pattern passes."""
    with pytest.raises(UserError):
        Variant.parse(name)
