"""Thumbnails of test images that the candidate got wrong and the model before got right."""

import base64
import io
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from fleet.device.errors import UserError
from tasks.data.dataset import Dataset
from tasks.report.pairing import Pairing

LIMIT = 24
_PER_CLASS = 4
_SIDE_PX = 112
"""Longest side of a thumbnail; shown at half of it or so, for dense screens."""
_QUALITY = 80


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One changed image."""

    data_uri: str
    side_px: int
    truth: str
    before: str
    after: str


def changed_pictures(pairing: Pairing, dataset: Dataset) -> tuple[Picture, ...]:
    """At most LIMIT images, those of the classes with most losses first, a few a class.

    Raises:
        UserError: a shard of the dataset cannot be read.
    """
    try:
        test = dataset.split("test")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{dataset.root}: {error}",
            allowed="the shards that its manifest names",
            next_step="`dvc repro prepare`, or `dvc checkout --force`",
        ) from error
    places = {sha: place for place, sha in enumerate(test.sha256)}
    losses = Counter(int(pairing.truth[i]) for i in pairing.right_to_wrong)
    order = sorted(
        pairing.right_to_wrong, key=lambda i: (-losses[int(pairing.truth[i])], int(pairing.truth[i]))
    )
    taken: Counter[int] = Counter()
    pictures: list[Picture] = []
    for i in order:
        truth, place = int(pairing.truth[i]), places.get(pairing.sha256[i])
        if place is None or taken[truth] == _PER_CLASS or len(pictures) == LIMIT:
            continue
        taken[truth] += 1
        side, uri = _data_uri(test.image(place))
        pictures.append(
            Picture(
                data_uri=uri,
                side_px=side,
                truth=pairing.labels[truth],
                before=pairing.labels[pairing.before_classes[i]],
                after=pairing.labels[pairing.after_classes[i]],
            )
        )
    return tuple(pictures)


def _data_uri(image_HWC: npt.NDArray[np.uint8]) -> tuple[int, str]:
    """Small originals without loss, larger ones as JPEG; the same pixels give the same text."""
    image, stream = Image.fromarray(image_HWC), io.BytesIO()
    if max(image.size) <= _SIDE_PX // 2:
        image.save(stream, "PNG", optimize=True)
        kind = "png"
    else:
        image.thumbnail((_SIDE_PX, _SIDE_PX), Image.Resampling.LANCZOS)
        image.save(stream, "JPEG", quality=_QUALITY, optimize=True)
        kind = "jpeg"
    return max(image.size), f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"
