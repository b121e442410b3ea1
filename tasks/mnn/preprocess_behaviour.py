"""What a model answers to the same pictures prepared in different ways, and how two ways compare.

Letters: N pictures, K classes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tasks.mnn.preprocess_alternatives import CROPS, DECODERS, RESIZERS, Picture, Pipeline, Pixels
from tasks.paired import Paired
from tasks.progress import track

Predict = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
"""One model input -> logits [K]."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """The answers to all pictures prepared in one way."""

    log_likelihood: npt.NDArray[np.float64]
    """[N], of the right class, in nats; 0 without labels."""
    classes: npt.NDArray[np.int64]
    """[N], the most likely one."""
    right: npt.NDArray[np.bool_]
    """[N], whether that is the label; False without labels."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a share of N pictures changes from one way to another, with its interval at 95 %."""

    points: float
    """Percentage points."""
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.points:+.1f} pp ({self.low:+.1f} to {self.high:+.1f})"


class Asked:
    """A model's answers; each way to prepare the pictures is asked once."""

    def __init__(
        self,
        predict: Predict,
        pictures: Sequence[Picture],
        labels: Sequence[int] | None,
        *,
        at_most: int | None = None,
    ) -> None:
        """Ask about the first `at_most` pictures, or all; `labels` are class indices."""
        self._predict, self._pictures = predict, pictures
        self._count = min(len(pictures), at_most or len(pictures))
        self._labels = None if labels is None else np.asarray(labels, np.int64)[: self._count]
        self._known: dict[Pipeline, Behaviour] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, pipeline: Pipeline) -> Behaviour:
        return self._known[pipeline]

    @property
    def labelled(self) -> bool:
        """Whether the right classes are known."""
        return self._labels is not None

    def first(self, count: int) -> Self:
        """The same for the first `count` pictures."""
        labels = None if self._labels is None else self._labels.tolist()
        return type(self)(self._predict, self._pictures, labels, at_most=min(count, len(self)))

    def ask(self, pipelines: Iterable[Pipeline]) -> None:
        """Run the model on every picture in every way not asked before, one picture in memory at a time."""
        new = [p for p in dict.fromkeys(pipelines) if p not in self._known]
        if not new:
            return
        log_likelihood_PN = np.zeros((len(new), len(self)))
        class_PN = np.zeros((len(new), len(self)), np.int64)
        for n in track(range(len(self)), f"{len(new)} ways to prepare an image", len(self)):
            picture, pixels = self._pictures[n], _Pixels()
            for p, pipeline in enumerate(new):
                logits_K = self._predict(pipeline.pack(pixels.of(picture, pipeline))).astype(np.float64)
                class_PN[p, n] = logits_K.argmax()
                if self._labels is not None:
                    log_likelihood_PN[p, n] = (logits_K - np.logaddexp.reduce(logits_K))[self._labels[n]]
        for p, pipeline in enumerate(new):
            right_N = np.zeros(len(self), bool) if self._labels is None else class_PN[p] == self._labels
            self._known[pipeline] = Behaviour(
                log_likelihood=log_likelihood_PN[p], classes=class_PN[p], right=right_N
            )

    def better_than_guessing(self, pipeline: Pipeline, min_t: float) -> bool:
        """Whether the model is right more often than naming the commonest class of its answers would be."""
        assert self._labels is not None
        labels_N, class_N = self._labels, self[pipeline].classes
        # What agreement there would be if answers and labels had nothing to do with each other.
        size = int(max(labels_N.max(), class_N.max())) + 1
        by_chance = np.bincount(labels_N, minlength=size) @ np.bincount(class_N, minlength=size)
        share = float(by_chance) / len(self) ** 2
        spread = math.sqrt(share * (1 - share) / len(self))
        return bool(self[pipeline].right.mean() - share > min_t * spread)


class _Pixels:
    """One picture's pixels, decoded and resized once for all pipelines that share these steps."""

    def __init__(self) -> None:
        self._decoded: dict[str, Pixels] = {}
        self._resized: dict[tuple[int, str, str, str], Pixels] = {}

    def of(self, picture: Picture, pipeline: Pipeline) -> Pixels:
        """uint8 RGB [size_px, size_px, 3]."""
        key = (pipeline.size_px, pipeline.decoder, pipeline.crop, pipeline.resize)
        if key not in self._resized:
            if pipeline.decoder not in self._decoded:
                decode = DECODERS[pipeline.decoder]
                self._decoded[pipeline.decoder] = decode(picture) if isinstance(picture, bytes) else picture
            image = self._decoded[pipeline.decoder]
            self._resized[key] = CROPS[pipeline.crop](image, pipeline.size_px, RESIZERS[pipeline.resize])
        return self._resized[key]


def change_of(asked: Asked, before: Pipeline, after: Pipeline) -> Change:
    """How the accuracy changes; without labels, how many pictures keep the class that `before` gives them."""
    one, two = asked[before], asked[after]
    if asked.labelled:
        return change_between(one.right, two.right)
    return change_between(np.ones(len(asked), bool), two.classes == one.classes)


def change_between(before_N: npt.NDArray[np.bool_], after_N: npt.NDArray[np.bool_]) -> Change:
    """How a share changes over the same N pictures."""
    paired = Paired.of(before_N, after_N)
    return Change(points=-paired.drop_pp, low=-paired.high_pp, high=-paired.low_pp, n=paired.n)


def t_statistic(gain_N: npt.NDArray[np.float64]) -> float:
    """The mean in standard errors; 0 where there is no spread."""
    if len(gain_N) < 2:
        return 0.0
    error = float(gain_N.std(ddof=1)) / math.sqrt(len(gain_N))
    return float(gain_N.mean()) / error if error > 0 else 0.0
