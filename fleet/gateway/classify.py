"""The cloud's model for hard samples: a callable, by default an MNN model in a thread of its own."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fleet.device.errors import EdgeloopError, UserError
from fleet.device.probabilities import softmax
from fleet.gateway.refusal import Refusal, unavailable

if TYPE_CHECKING:
    from fleet.device.engine import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a model says of one image."""

    index: int
    label: str
    confidence: float
    """Largest softmax probability."""
    model: str


Classifier = Callable[[bytes], Found]
"""A PNG to what it shows; called in one thread only.

Raises:
    EdgeloopError: it cannot tell.
"""


class MnnClassifier:
    """An .mnn file with its `card.json` beside it, opened with the first image."""

    def __init__(self, model: Path) -> None:
        """Read the card.

        Raises:
            UserError: the model or its card is missing.
        """
        card = model.with_name("card.json")
        if not (model.is_file() and card.is_file()):
            raise UserError(
                f"classifier {model}",
                allowed="an .mnn file with its card.json beside it",
                next_step="name one below models/mnn/ of a build",
            )
        record = json.loads(card.read_text(encoding="utf-8"))
        self._model, self._name = model, str(record["variant"])
        self._labels = [str(label) for label in record["labels"]]
        from fleet.device.preprocess import Preprocess

        self._preprocess = Preprocess.from_dict(record["preprocess"])
        self._session: Session | None = None  # the engine is imported and opened in its thread

    def __call__(self, png: bytes) -> Found:
        import cv2

        from fleet.device.engine import RuntimeConfig, Session

        image_BGR = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
        if image_BGR is None:
            raise UserError("an image that does not decode", allowed="a PNG", next_step="encode it anew")
        if self._session is None:
            self._session = Session(self._model, config=RuntimeConfig())
        name = next(iter(self._session.inputs))
        image_HWC = np.ascontiguousarray(image_BGR[..., ::-1])
        logits = next(iter(self._session.run({name: self._preprocess.apply(image_HWC)}).values())).ravel()
        shares = softmax(logits)
        best = int(shares.argmax())
        return Found(index=best, label=self._labels[best], confidence=float(shares[best]), model=self._name)


class CloudModel:
    """Runs a classifier in one thread, a bounded number of images waiting."""

    def __init__(self, classifier: Classifier | None, *, waiting: int) -> None:
        """None: there is no such model here."""
        self._classifier, self._free = classifier, waiting
        self._thread = ThreadPoolExecutor(1, "edgeloop-gateway-classifier")

    async def classify(self, png: bytes) -> Found:
        """What the model finds.

        Raises:
            Refusal: 501 without a model, 503 when too many wait, 422 for an image it cannot use.
        """
        if self._classifier is None:
            raise Refusal(
                501,
                "no_classifier",
                "a gateway without a cloud model",
                allowed="a gateway started with --classifier",
                next_step="keep the device's own answer",
            )
        if self._free <= 0:
            raise unavailable("busy", "too many images are waiting")
        self._free -= 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._classifier, png)
        except EdgeloopError as error:
            raise Refusal(
                422,
                "image",
                "an image that the model cannot use",
                allowed="a PNG that decodes",
                next_step="keep the device's own answer",
            ) from error
        finally:
            self._free += 1

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
