"""Section `gate` of params.yaml: the thresholds, and who accepted what beyond them."""

from collections import Counter
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, field_validator

from tasks.foreign_text import is_visible
from tasks.stage import Params


def _readable(text: str) -> str:
    if not is_visible(text):
        raise ValueError("there is nothing to read in it")
    return text


_Said = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), AfterValidator(_readable)]


class Waiver(Params):
    """One person's decision to accept one measured value beyond its threshold."""

    check: _Said
    """Name of the check, as the gate's table has it."""
    by: _Said
    """Who takes the decision."""
    why: Annotated[_Said, StringConstraints(max_length=4000)]
    up_to: float = Field(allow_inf_nan=False)
    """The worst measured value this holds for, in the check's unit; beyond it the check fails as without."""
    mnn_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{12,64}$")
    """The model file this holds for, by 12 or more digits of its SHA-256; None: later builds, too."""


class GateParams(Params):
    """Section `gate` of params.yaml."""

    model_config = ConfigDict(allow_inf_nan=False)  # an infinite threshold would be no check, unsaid

    min_top1: float = Field(default=0.9, ge=0, le=1)
    """Accuracy floor of every variant, as a share of the test set, measured in the engine."""
    max_prune_drop_pp: float = Field(default=1.0, ge=0, le=100)
    """Most percentage points the pruned fp32 model may lose against the trained one."""
    max_precision_drop_pp: float = Field(default=1.0, ge=0, le=100)
    """Most percentage points an fp16, w8 or i8 model may lose against its fp32 parent."""
    max_champion_drop_pp: float = Field(default=0.5, ge=0, le=100)
    """Most percentage points a variant may lose against the champion on the same test images."""
    max_class_drop_pp: float = Field(default=20.0, ge=0, le=100)
    """Most percentage points of its recall one class may lose against the champion, beyond chance."""
    max_size_mb: float = Field(default=10.0, gt=0)
    """Largest model file in 10^6 bytes."""
    max_p95_ms: float = Field(default=50.0, gt=0)
    max_p99_ms: float = Field(default=100.0, gt=0)
    """Latency floors; compared with the upper confidence bound, not with the observed percentile."""
    max_peak_memory_mb: float = Field(default=120.0, gt=0)
    """Most MiB the process may take while the model runs; MiB, as benchmark reports count them."""
    min_agreement: float = Field(default=0.99, ge=0, le=1)
    """Share of test images on which the engine must predict what the torch reference predicts."""
    devices: tuple[str, ...] = ("local",)
    """Devices whose benchmark is judged: those of the workspace's `devices`."""
    waivers: tuple[Waiver, ...] = ()
    """What a person accepted; shown with the verdict `waived` wherever the verdict is shown."""

    @field_validator("waivers")
    @classmethod
    def _one_a_check(cls, waivers: tuple[Waiver, ...]) -> tuple[Waiver, ...]:
        twice = [name for name, count in Counter(w.check for w in waivers).items() if count > 1]
        if twice:
            raise ValueError(f"more than one waiver of {twice[0]!r}")
        return waivers
