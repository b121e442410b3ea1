"""Naming a preprocessing mismatch from how a model behaves on real pictures.

The model gets the same pictures prepared in every usual way. One way is its home: the one it was trained
with where that is known, else the one claimed, unless another suits it significantly better. Around home,
every alternative differs in one step and shows what that step costs; the steps in which the claimed way
differs from home are its mismatches. Judging around the claimed way instead would blame steps that only make
up for the wrong one: with pixels of 0..1 for a model that wants ImageNet's mean, a sharper resize helps.

Letters: N pictures, K classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.preprocess_alternatives import (
    CLOSER_CROP,
    CROPS,
    GEOMETRY,
    LAYOUTS,
    STEPS,
    Picture,
    Pipeline,
    alternatives,
    claimed_pipeline,
    label,
    normalizations,
)
from tasks.mnn.preprocess_behaviour import Asked, Change, Predict, change_of, t_statistic

Verdict = Literal["fits", "mismatch", "cannot tell"]
StepVerdict = Literal["confirmed", "mismatch", "cannot tell"]

MIN_T = 3.5
"""Two-sided p < 0.0005 for one comparison: about 30 alternatives together stay below 2 %."""
MIN_PICTURES = 20
MUST_BE_SURE = (STEPS["color_order"], STEPS["layout"])
"""Steps that have to be confirmed before a claim is said to fit; the others have near equals by nature."""
_SWEEP_PICTURES = 64
_MAX_MOVES = 4


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One alternative that differs from home in one step, over the same pictures."""

    step: str
    choice: str
    """What this alternative does in that step."""
    change: Change
    """Of the accuracy, from home to this alternative; of agreeing with home without labels."""
    t: float
    """Mean gain in log-likelihood of the right class over home, in standard errors; 0 without labels."""


@dataclass(frozen=True, kw_only=True)
class StepDiagnosis:
    """What the model says about one step."""

    step: str
    verdict: StepVerdict
    claimed: str
    home: str
    rivals: tuple[str, ...]
    """Other choices that these pictures cannot tell from home's."""
    change: Change
    """Of the accuracy, from claimed to home in this step alone; of nothing where they are equal."""
    t: float

    @property
    def mismatch(self) -> str:
        """`colour order RGB instead of BGR`: what the model wants, and what was claimed."""
        return f"{self.step} {self.home} instead of {self.claimed}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Every step's verdict, and the trials behind them."""

    claimed: Pipeline
    home: Pipeline
    """What suits the model."""
    steps: tuple[StepDiagnosis, ...]
    trials: tuple[Trial, ...]
    """Around home, the most costly last."""
    claimed_top1: float | None
    home_top1: float | None
    """Both None without labels."""
    change: Change
    """Of the accuracy, from claimed to home in all steps; of agreeing with home without labels."""
    pictures: int
    labelled: bool
    doubt: str
    """Why these pictures decide nothing; empty when they may."""

    @property
    def mismatches(self) -> tuple[str, ...]:
        """The mismatches that are certain, the most certain first."""
        found = [step for step in self.steps if step.verdict == "mismatch"]
        return tuple(step.mismatch for step in sorted(found, key=lambda step: -step.t))

    @property
    def verdict(self) -> Verdict:
        """Whether the claimed way suits the model, as far as the pictures tell."""
        if self.mismatches:
            return "mismatch"
        differs = self.claimed != self.home
        unsure = any(s.verdict == "cannot tell" for s in self.steps if s.step in MUST_BE_SURE)
        return "cannot tell" if self.doubt or differs or unsure else "fits"


def diagnose(
    predict: Predict,
    pictures: Sequence[Picture],
    labels: Sequence[int] | None,
    claimed: Preprocess,
    *,
    as_fed: Pipeline | None = None,
    trained: Preprocess | None = None,
    encoded: bool = True,
) -> Diagnosis:
    """Ask a model, through its behaviour, whether it was made for the claimed preprocessing.

    An alternative's gain is the paired difference, over the pictures, of the log-likelihood of the right
    class. A step is a mismatch when home gains over the claimed choice by 3.5 standard errors and is no less
    accurate, confirmed when claimed is home and every alternative loses by as much. Without labels nothing is
    a mismatch, for confidence is no witness (a saturated input makes models sure); then the trials count how
    often an alternative changes the predicted class.

    Args:
        predict: The model.
        pictures: Real pictures, image files or uint8 RGB [H, W, 3]; read one at a time.
        labels: Class index of each picture, or None.
        claimed: What is to be checked.
        as_fed: How that ends in the model's input, where its size or layout is not the claimed one.
        trained: What the model was trained with, where that is known for sure.
        encoded: Whether OpenCV decodes the pictures that are files, so that decoders can differ.

    Raises:
        UserError: no pictures, or not one label a picture.
    """
    if not len(pictures) or (labels is not None and len(labels) != len(pictures)):
        raise UserError(
            f"{len(pictures)} pictures and {'no' if labels is None else len(labels)} labels",
            allowed="at least one picture, and a label for each or none at all",
            next_step="pass real pictures, best labelled ones",
        )
    base = as_fed or claimed_pipeline(claimed)
    search = _Search(
        asked=Asked(predict, pictures, labels),
        base=base,
        records=[trained, claimed] if trained else [claimed],
        encoded=encoded and all(isinstance(picture, bytes) for picture in (pictures[0], pictures[-1])),
    )
    known = replace(claimed_pipeline(trained), layout=_shaped(base, trained)) if trained else None
    home = search.home(known)
    return _diagnosis(search, home, certain=known == home)


def engine_predict(session: Session) -> Predict:
    """The first output of an open MNN classifier with one input, as log-probabilities or logits."""
    name = next(iter(session.inputs))

    def predict(tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        scores: npt.NDArray[np.float32] = next(iter(session.run({name: tensor}).values()))[0]
        if scores.min() >= 0 and abs(float(scores.sum()) - 1) < 1e-3:  # a softmax ends the model
            return np.log(np.maximum(scores, np.finfo(np.float32).tiny))
        return scores

    return predict


def _shaped(base: Pipeline, trained: Preprocess) -> str:
    """The layout trained with, or the claimed one where the two tensors have different shapes."""
    fits = LAYOUTS[base.layout].same_shape_as == trained.layout
    return trained.layout if fits else base.layout


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Finding home."""

    asked: Asked
    base: Pipeline
    records: Sequence[Preprocess]
    encoded: bool

    def around(self, pipeline: Pipeline) -> list[tuple[str, Pipeline]]:
        """(field, alternative) of all that differ from a pipeline in one step."""
        return list(alternatives(pipeline, *self.records, encoded=self.encoded))

    def home(self, known: Pipeline | None) -> Pipeline:
        """What suits the model: `known` or the claimed way, unless another one is significantly better."""
        home = known or self.base
        if not self.asked.labelled or len(self.asked) < MIN_PICTURES:
            return home
        home = self._better(home, [self._sweep(home)])
        for _ in range(_MAX_MOVES):
            # How pixels were resized is what training says: a model may do better with another crop.
            nearby = [p for field, p in self.around(home) if known is None or field not in GEOMETRY]
            # A closer look is a little better for many models, however they were trained: it names nothing.
            nearby = [p for p in nearby if p.crop in {*CROPS} - {CLOSER_CROP} | {self.base.crop}]
            moved = self._better(home, nearby)
            if moved == home:
                break
            home = moved
        return self._plain(home)

    def _plain(self, home: Pipeline) -> Pipeline:
        """Home in the plain order of axes, unless the odd one is certainly better."""
        plain = replace(home, layout=LAYOUTS[home.layout].same_shape_as)
        self.asked.ask([plain])
        gain_N = self.asked[home].log_likelihood - self.asked[plain].log_likelihood
        return home if home == self.base or t_statistic(gain_N) >= MIN_T else plain

    def _sweep(self, home: Pipeline) -> Pipeline:
        """The likeliest of all colour orders, normalisations and layouts together, on some pictures.

        Two wrong steps hide each other: with both, mending one may bring nothing.
        """
        shape = LAYOUTS[home.layout].same_shape_as
        layouts = [name for name, rule in LAYOUTS.items() if rule.same_shape_as == shape]
        ways = [
            replace(home, color_order=order, normalization=normalization, layout=layout)
            for order in ("RGB", "BGR")
            for normalization, layout in product(normalizations(*self.records), layouts)
        ]
        some = self.asked.first(_SWEEP_PICTURES)
        some.ask(ways)
        return max(ways, key=lambda way: float(some[way].log_likelihood.mean()))

    def _better(self, home: Pipeline, others: Iterable[Pipeline]) -> Pipeline:
        """The best of those that are certainly better than home; home when none is."""
        others = list(others)
        self.asked.ask([home, *others])
        better = [other for other in others if _suits_better(self.asked, other, home)]
        return max(better, key=lambda way: float(self.asked[way].log_likelihood.mean()), default=home)


def _suits_better(asked: Asked, one: Pipeline, two: Pipeline) -> bool:
    """Whether the model is certainly likelier to be right, and certainly more often right, with `one`.

    Likelihood is the sharper witness; a mean that differs in the third digit moves it without consequence.
    """
    gain_N = asked[one].log_likelihood - asked[two].log_likelihood
    return t_statistic(gain_N) >= MIN_T and change_of(asked, two, one).low > 0


def _diagnosis(search: _Search, home: Pipeline, *, certain: bool) -> Diagnosis:
    asked, base = search.asked, search.base
    nearby = search.around(home)
    single = {
        field.name: replace(home, **{field.name: getattr(base, field.name)})
        for field in fields(Pipeline)
        if getattr(base, field.name) != getattr(home, field.name)
    }
    asked.ask([home, base, *(pipeline for _, pipeline in nearby), *single.values()])
    doubt = _doubt(asked, home)
    trials = [_trial(asked, home, field, pipeline) for field, pipeline in nearby]
    steps = [
        _judge(asked, (single.get(field, home), home), [t for t in trials if t.step == STEPS[field]], field)
        for field in dict.fromkeys([*(field for field, _ in nearby), *single])
    ]
    if doubt:
        steps = [replace(step, verdict="cannot tell") for step in steps]
    if certain:  # that home is right is known, whatever else would do on these pictures
        steps = [
            replace(s, rivals=(), verdict="confirmed" if s.claimed == s.home and not doubt else s.verdict)
            for s in steps
        ]
    return Diagnosis(
        claimed=base,
        home=home,
        steps=tuple(steps),
        trials=tuple(sorted(trials, key=lambda trial: (-trial.change.points, -trial.t))),
        claimed_top1=float(asked[base].right.mean()) if asked.labelled else None,
        home_top1=float(asked[home].right.mean()) if asked.labelled else None,
        change=change_of(asked, base, home),
        pictures=len(asked),
        labelled=asked.labelled,
        doubt=doubt,
    )


def _doubt(asked: Asked, home: Pipeline) -> str:
    if not asked.labelled:
        return "without labels nothing says which class is right"
    if len(asked) < MIN_PICTURES:
        return f"{len(asked)} of the pictures needed, at least {MIN_PICTURES} and better 200"
    if not asked.better_than_guessing(home, MIN_T):
        return (
            "no way to prepare the pictures makes the model better than guessing "
            f"({asked[home].right.mean():.1%} right): it has other classes, or another order of them"
        )
    return ""


def _trial(asked: Asked, home: Pipeline, field: str, pipeline: Pipeline) -> Trial:
    gain = asked[pipeline].log_likelihood - asked[home].log_likelihood
    return Trial(
        step=STEPS[field],
        choice=label(getattr(pipeline, field)),
        change=change_of(asked, home, pipeline),
        t=t_statistic(gain) if asked.labelled else 0.0,
    )


def _judge(
    asked: Asked, ways: tuple[Pipeline, Pipeline], trials: Sequence[Trial], field: str
) -> StepDiagnosis:
    """The verdict on one step; `ways` are home with the claimed choice in this step, and home."""
    claimed, home = ways
    gain_N = asked[home].log_likelihood - asked[claimed].log_likelihood
    verdict: StepVerdict = "cannot tell"
    if claimed != home and asked.labelled and _suits_better(asked, home, claimed):
        verdict = "mismatch"
    elif claimed == home and all(trial.t <= -MIN_T for trial in trials):
        verdict = "confirmed"
    return StepDiagnosis(
        step=STEPS[field],
        verdict=verdict,
        claimed=label(getattr(claimed, field)),
        home=label(getattr(home, field)),
        rivals=tuple(trial.choice for trial in trials if trial.t > -MIN_T),
        change=change_of(asked, claimed, home),
        t=t_statistic(gain_N),
    )
