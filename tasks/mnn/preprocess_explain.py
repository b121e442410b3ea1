"""Naming what another program does differently, from one picture and the model input it made of it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.preprocess_alternatives import (
    CROPS,
    DECODERS,
    LAYOUTS,
    RESIZERS,
    Normalization,
    Picture,
    Pipeline,
    Tensor,
    claimed_pipeline,
    normalizations,
)

_REPRODUCED_LEVELS = 1.0  # of 256: rounding to uint8 between steps, and arithmetic in half precision
_TIE_LEVELS = 0.02
_NORMALIZATION_TOLERANCE = 0.01  # of the input's range


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What another program does differently from the contract."""

    mismatches: tuple[str, ...]
    """Named steps; empty when the tensor is what the contract gives."""
    residual_levels: float
    """Root mean square difference that stays unexplained, in pixel levels of 0..255."""
    reproduced: bool
    """Whether the named pipeline gives the tensor; if not it is only the closest one known."""
    also_possible: tuple[tuple[str, ...], ...]
    """Other explanations that this picture cannot tell apart, e.g. colour orders of a grey picture."""

    def __str__(self) -> str:
        if not self.reproduced:
            return (
                f"unknown preprocessing; the closest known has {self.residual_levels:.1f} levels of 255 left"
            )
        text = "; ".join(self.mismatches) or "no mismatch"
        others = " | ".join("; ".join(m) or "no mismatch" for m in self.also_possible)
        return f"{text} (this picture cannot exclude: {others})" if others else text


def explain(theirs: Tensor, picture: Picture, claimed: Preprocess) -> Explanation:
    """Say how `theirs` was made from `picture`, relative to the contract.

    All usual decoders, crops, filters, colour orders and layouts are tried together; the normalisation is
    fitted per channel, so an unusual mean or std is found too and named by its numbers.

    Args:
        theirs: The other program's model input, [1, 3, S, S] or [1, S, S, 3], any real dtype.
        picture: The same picture, as file content or uint8 RGB [H, W, 3].
        claimed: The contract to hold it against.

    Raises:
        UserError: `theirs` has another shape or is not finite.
    """
    size_px = _size_of(theirs)
    base = claimed_pipeline(claimed)
    fits = list(_fits(theirs.astype(np.float64), picture, replace(base, size_px=size_px)))
    best = min(fit.residual_levels for fit in fits)
    candidates = {
        replace(pipeline, normalization=_normalization(fit, claimed)).differences(base)
        for fit in fits
        if fit.residual_levels <= best + _TIE_LEVELS
        for pipeline in fit.pipelines
    }
    simplest, *others = sorted(candidates, key=lambda names: (len(names), names))
    # Of the others, those that contain another one add nothing.
    minimal = [one for one in others if not any(set(two) < set(one) for two in others)]
    return Explanation(
        mismatches=simplest,
        residual_levels=best,
        reproduced=best <= _REPRODUCED_LEVELS,
        also_possible=tuple(minimal),
    )


def _size_of(tensor: Tensor) -> int:
    shape = tensor.shape
    nchw = len(shape) == 4 and shape[:2] == (1, 3) and shape[2] == shape[3]
    nhwc = len(shape) == 4 and shape[0] == 1 and shape[3] == 3 and shape[1] == shape[2]
    if not (nchw or nhwc) or tensor.dtype.kind not in "fiu" or not np.isfinite(tensor).all():
        raise UserError(
            f"a model input with shape {shape} and dtype {tensor.dtype}",
            allowed="finite real numbers, shape [1, 3, S, S] or [1, S, S, 3]",
            next_step="dump the input of one picture as the app feeds it",
        )
    return int(shape[2])


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """How well a geometry, colour order and layout explain a tensor, whatever the normalisation."""

    residual_levels: float
    pipelines: tuple[Pipeline, ...]
    """Several where their pixels are equal on this picture."""
    pixels: npt.NDArray[np.float64]
    """[H, W, 3] in the pipelines' colour order."""
    tensor: npt.NDArray[np.float64]


def _fits(theirs: npt.NDArray[np.float64], picture: Picture, base: Pipeline) -> Iterator[_Fit]:
    decoders = list(DECODERS) if isinstance(picture, bytes) else [base.decoder]
    geometries: dict[bytes, list[Pipeline]] = {}
    for decoder, crop, resize in itertools.product(decoders, CROPS, RESIZERS):
        geometry = replace(base, decoder=decoder, crop=crop, resize=resize)
        geometries.setdefault(geometry.pixels(picture).tobytes(), []).append(geometry)
    layouts = [
        (name, rule.unpack(theirs))
        for name, rule in LAYOUTS.items()
        if (theirs.shape[1] == 3) == (rule.same_shape_as == "NCHW")
    ]
    for content, same in geometries.items():
        levels = np.frombuffer(content, np.uint8).reshape(base.size_px, base.size_px, 3).astype(np.float64)
        for color_order, (layout, tensor_HWC) in itertools.product(("RGB", "BGR"), layouts):
            pixels = levels if color_order == "RGB" else levels[..., ::-1]
            yield _Fit(
                residual_levels=_residual_levels(pixels, tensor_HWC),
                pipelines=tuple(replace(g, color_order=color_order, layout=layout) for g in same),
                pixels=pixels,
                tensor=tensor_HWC,
            )


def _fit_channels(
    pixels_HWC: npt.NDArray[Any], tensor_HWC: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Least-squares scale and offset of each channel; scale 0 where the pixels do not vary."""
    centred = pixels_HWC - pixels_HWC.mean((0, 1))
    variance = (centred**2).mean((0, 1))
    covariance = (centred * tensor_HWC).mean((0, 1))
    scale = np.divide(covariance, variance, out=np.zeros(3), where=variance > 0)
    return scale, tensor_HWC.mean((0, 1)) - scale * pixels_HWC.mean((0, 1))


def _residual_levels(pixels_HWC: npt.NDArray[Any], tensor_HWC: npt.NDArray[Any]) -> float:
    """What the best normalisation leaves unexplained, in pixel levels."""
    scale, offset = _fit_channels(pixels_HWC, tensor_HWC)
    left = ((pixels_HWC * scale + offset - tensor_HWC) ** 2).mean((0, 1))
    spread = tensor_HWC.var((0, 1))
    # The share of variance left, times the pixels' own spread: defined for a scale of 0 as well.
    share = np.divide(left, spread, out=np.zeros(3), where=spread > 0)
    return float(np.sqrt((share * pixels_HWC.var((0, 1))).mean()))


def _normalization(fit: _Fit, claimed: Preprocess) -> Normalization:
    """The known normalisation that turns pixels into tensor, else the fitted one, named by its numbers."""
    scale, offset = _fit_channels(fit.pixels, fit.tensor)
    fitted = fit.pixels * scale + offset
    extent = float(np.ptp(fitted)) or 1.0
    for known in normalizations(claimed):
        if float(np.abs(known.apply(fit.pixels) - fitted).max()) <= _NORMALIZATION_TOLERANCE * extent:
            return known
    with np.errstate(divide="ignore", invalid="ignore"):
        std = 1 / (255 * scale)
        mean = -offset * std
    text = ", ".join(f"{m:.3g}/{s:.3g}" for m, s in zip(mean, std, strict=True))
    return Normalization(name=f"mean/std {text}", scale=tuple(scale), offset=tuple(offset))
