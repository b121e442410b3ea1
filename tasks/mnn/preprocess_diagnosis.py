"""Naming a preprocessing mismatch: from one tensor that another program made, or from how a model behaves.

`explain` takes the tensor an app fed to its model and the picture it came from, and says which steps the app
does differently. `diagnose` has no such tensor: it feeds a model the same pictures prepared in every usual
way and asks, step by step, whether the way the model card claims is the one that suits the model, with
statistics and the answer `inconclusive` where the pictures cannot tell.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.preprocess_alternatives import (
    CROPS,
    DECODERS,
    LAYOUTS,
    RESIZERS,
    STEPS,
    Normalization,
    Picture,
    Pipeline,
    Tensor,
    alternatives,
    claimed_pipeline,
    normalizations,
)

Predict = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""One model input -> logits [num_classes]."""
Verdict = Literal["confirmed", "mismatch", "inconclusive"]

_REPRODUCED_LEVELS = 1.0  # of 256: rounding to uint8 between steps, and arithmetic in half precision
_TIE_LEVELS = 0.02
_NORMALIZATION_TOLERANCE = 0.01  # of the input's range
# Two-sided p < 0.0005 for one comparison: about 30 alternatives together stay below 2 %.
_MIN_T = 3.5
_MIN_PICTURES = 20


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


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One alternative against the claimed pipeline, over the same pictures."""

    step: str
    difference: str
    mean_gain: float
    """Mean log-likelihood with the alternative minus that with the claimed pipeline, in nats."""
    t: float
    """`mean_gain` in standard errors; 0 where the pictures make no difference."""
    top1: float | None
    """Accuracy with this alternative; None without labels."""


@dataclass(frozen=True, kw_only=True)
class StepDiagnosis:
    """What the model says about one step."""

    step: str
    verdict: Verdict
    best: Trial
    """The alternative with the largest gain."""
    rivals: tuple[str, ...]
    """Other alternatives that these pictures cannot tell from the best one, e.g. two similar means."""

    def __str__(self) -> str:
        said = {
            "mismatch": f"the model wants {' or '.join((self.best.difference, *self.rivals))}",
            "confirmed": "as claimed",
            "inconclusive": f"cannot exclude {self.best.difference}",
        }[self.verdict]
        return f"{self.step}: {self.verdict}, {said} (t = {self.best.t:+.1f})"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Every step's verdict, and all trials behind them."""

    steps: tuple[StepDiagnosis, ...]
    trials: tuple[Trial, ...]
    """Best first."""
    claimed_top1: float | None
    pictures: int
    labelled: bool

    @property
    def mismatches(self) -> tuple[str, ...]:
        """The named mismatches, the most certain first; empty when there is none or nothing can be said."""
        found = [step for step in self.steps if step.verdict == "mismatch"]
        return tuple(s.best.difference for s in sorted(found, key=lambda s: -s.best.t))


def diagnose(
    predict: Predict, pictures: Sequence[Picture], labels: Sequence[int] | None, claimed: Preprocess
) -> Diagnosis:
    """Ask a model, through its behaviour, which preprocessing it was made for.

    Each alternative differs from the claimed pipeline in one step. Its gain is the paired difference, over
    the pictures, of the log-likelihood of the right class, or of the most likely class where there are no
    labels (a weaker witness: confidence). A step is a mismatch when an alternative gains by more than 3.5
    standard errors, confirmed when every alternative loses by as much, and inconclusive otherwise or with
    fewer than 20 pictures.

    Args:
        predict: The model.
        pictures: Real pictures, image files or uint8 RGB [H, W, 3].
        labels: Class index of each picture, or None.
        claimed: What the model card says.

    Raises:
        UserError: no pictures, or not one label a picture.
    """
    if not pictures or (labels is not None and len(labels) != len(pictures)):
        raise UserError(
            f"{len(pictures)} pictures and {'no' if labels is None else len(labels)} labels",
            allowed="at least one picture, and a label for each or none at all",
            next_step="pass real pictures, best labelled ones",
        )
    base = claimed_pipeline(claimed)
    encoded = all(isinstance(picture, bytes) for picture in pictures)
    base_scores, claimed_top1 = _scores(predict, base, pictures, labels)
    gains: dict[Trial, npt.NDArray[np.float64]] = {}
    for step, pipeline in alternatives(base, claimed, encoded=encoded):
        scores, top1 = _scores(predict, pipeline, pictures, labels)
        gain = scores - base_scores
        gains[_trial(STEPS[step], pipeline.differences(base)[0], gain, top1)] = gain
    trials = tuple(sorted(gains, key=lambda trial: -trial.mean_gain))
    return Diagnosis(
        steps=tuple(
            _judge(step, {trial: gains[trial] for trial in trials if trial.step == step})
            for step in dict.fromkeys(trial.step for trial in trials)
        ),
        trials=trials,
        claimed_top1=claimed_top1,
        pictures=len(pictures),
        labelled=labels is not None,
    )


def engine_predict(session: Session) -> Predict:
    """The first output of an open MNN classifier with one input."""
    name = next(iter(session.inputs))

    def predict(tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = next(iter(session.run({name: tensor}).values()))[0]
        return logits

    return predict


def _trial(step: str, difference: str, gain: npt.NDArray[np.float64], top1: float | None) -> Trial:
    return Trial(
        step=step, difference=difference, mean_gain=float(gain.mean()), t=_t_statistic(gain), top1=top1
    )


def _judge(step: str, gains: Mapping[Trial, npt.NDArray[np.float64]]) -> StepDiagnosis:
    """The verdict on one step from its alternatives, best first."""
    trials = list(gains)
    best = trials[0]
    if len(gains[best]) < _MIN_PICTURES:
        verdict: Verdict = "inconclusive"
    elif best.t >= _MIN_T:
        verdict = "mismatch"
    else:
        verdict = "confirmed" if all(trial.t <= -_MIN_T for trial in trials) else "inconclusive"
    rivals = [t for t in trials[1:] if _t_statistic(gains[best] - gains[t]) < _MIN_T]
    return StepDiagnosis(
        step=step, verdict=verdict, best=best, rivals=tuple(trial.difference for trial in rivals)
    )


def _scores(
    predict: Predict, pipeline: Pipeline, pictures: Sequence[Picture], labels: Sequence[int] | None
) -> tuple[npt.NDArray[np.float64], float | None]:
    """Log-likelihood of each picture's label (or most likely class), and the accuracy if there are labels."""
    logits = np.stack([predict(pipeline.apply(picture)) for picture in pictures]).astype(np.float64)
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    if labels is None:
        return log_p.max(axis=1), None
    wanted = np.asarray(labels)
    return log_p[np.arange(len(wanted)), wanted], float((log_p.argmax(axis=1) == wanted).mean())


def _t_statistic(gain: npt.NDArray[np.float64]) -> float:
    if len(gain) < 2:  # no spread to measure
        return 0.0
    error = float(gain.std(ddof=1)) / math.sqrt(len(gain))
    return float(gain.mean()) / error if error > 0 else 0.0


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
