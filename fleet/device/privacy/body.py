"""One raw input with its context, as bytes: all that the wire's `Sample` has, and nothing else."""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import cv2
import numpy as np
import numpy.typing as npt

from fleet.device.errors import EngineError
from fleet.device.wire import SCHEMA, Environment, Sample, Versions

_BLOCK_BYTES = 16 << 10


class RevokedError(ConnectionAbortedError):
    """Consent ended while a sample was on its way: the rest of it stays here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What is told of a raw input."""

    taken_ms: int
    versions: Versions
    environment: Environment
    predicted: int | None
    """Index of the class that the device found."""
    confidence: float | None
    anomalies: tuple[str, ...] = ()
    """`wire.Anomaly` of this inference."""


def hard_reason(context: Context, confidence_minimum: float) -> str:
    """Why this input is worth looking at; empty when it is not."""
    if context.anomalies:
        return "anomaly: " + ", ".join(context.anomalies)
    unsure = context.confidence is not None and not context.confidence >= confidence_minimum  # NaN is unsure
    return "low confidence" if unsure else ""


def png(image_HWC: npt.NDArray[np.uint8]) -> bytes:
    """A uint8 RGB image [H, W, 3] as PNG, without any metadata.

    Raises:
        EngineError: OpenCV cannot encode it.
    """
    try:
        done, encoded = cv2.imencode(".png", np.ascontiguousarray(image_HWC[..., ::-1]))
    except cv2.error as error:
        raise EngineError(f"no PNG of {image_HWC.shape}", engine_said=str(error)) from error
    if not done:
        raise EngineError(f"no PNG of {image_HWC.shape}")
    return bytes(encoded.tobytes())


def sample_body(image_png: bytes, context: Context, reason: str) -> bytes:
    """Body of `POST /v1/samples` and `POST /v1/classify`; only for somebody who has consent."""
    finite = context.confidence is not None and np.isfinite(context.confidence)
    sample = Sample(
        schema=SCHEMA,
        consent=True,
        taken_ms=context.taken_ms,
        image_png=image_png,
        versions=context.versions,
        environment=context.environment,
        predicted=context.predicted,
        confidence=context.confidence if finite else None,
        reason=reason,
    )
    record = asdict(sample) | {"image_png": base64.b64encode(image_png).decode()}
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()


def while_allowed(body: bytes, allowed: Callable[[], bool]) -> Iterator[bytes]:
    """The body in blocks, each only while it is allowed.

    Raises:
        RevokedError: it no longer is.
    """
    for at in range(0, len(body), _BLOCK_BYTES):
        if not allowed():
            raise RevokedError("consent was revoked")
        yield body[at : at + _BLOCK_BYTES]
