"""Variant names decode: `mbv3s-p30-i8-r224` is MobileNetV3-Small, 30 % pruned, int8, 224 px input."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from fleet.device.errors import UserError

Precision = Literal["fp32", "fp16", "w8", "i8"]

# Short names where the field has one; any other torchvision name stands as it is.
SHORT_NAMES = {
    "mobilenet_v3_small": "mbv3s",
    "mobilenet_v3_large": "mbv3l",
    "mobilenet_v2": "mbv2",
    "resnet18": "rn18",
    "resnet50": "rn50",
}
_LONG_NAMES = {short: name for name, short in SHORT_NAMES.items()}
_PATTERN = re.compile(
    r"(?P<arch>[a-z0-9_]+)-p(?P<pruned>\d{1,2})-(?P<precision>fp32|fp16|w8|i8)-r(?P<size>\d{1,4})"
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One deployable form of a model."""

    architecture: str
    """torchvision's model name."""
    pruned_percent: int
    """Share of channels removed, 0..99."""
    precision: Precision
    """fp32; fp16: half-precision weights; w8: int8 weights, float arithmetic; i8: int8 arithmetic."""
    size_px: int
    """Side of the square input in pixels."""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise UserError(
                f"precision {self.precision!r}",
                allowed=", ".join(get_args(Precision)),
                next_step="correct export.variants in params.yaml",
            )

    @property
    def name(self) -> str:
        """The decodable name; holds no `@`, which DVC and MLflow refuse."""
        short = SHORT_NAMES.get(self.architecture, self.architecture)
        return f"{short}-p{self.pruned_percent}-{self.precision}-r{self.size_px}"

    @classmethod
    def parse(cls, name: str) -> "Variant":
        """The inverse of `name`; UserError for anything else."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            raise UserError(
                f"variant name {name!r}",
                allowed="ARCH-pPERCENT-PRECISION-rPIXELS, e.g. mbv3s-p30-i8-r224",
                next_step="take a name from reports/convert.json",
            )
        return cls(
            architecture=_LONG_NAMES.get(match["arch"], match["arch"]),
            pruned_percent=int(match["pruned"]),
            precision=match["precision"],  # type: ignore[arg-type]  # the pattern admits nothing else
            size_px=int(match["size"]),
        )
