"""What the privacy tests share."""

import numpy as np

from fleet.device.privacy.body import Context
from fleet.device.wire import Environment, Versions

VERSIONS = Versions(release=7, model="m-7", engine="3.6.1", config="c-1", monitor="1", app="2.0")
ENVIRONMENT = Environment(
    device_model="SM-C7010",
    os="Android 8.0",
    network="wifi",
    charging=True,
    backend="CPU",
    driver="",
    tier="mid",
    variant="mbv3s-p30-i8-r48",
)
NOW_MS = 1_760_000_000_000
DAY_MS = 86_400_000


def context(confidence=0.1, **more):
    return Context(
        **{
            "taken_ms": NOW_MS,
            "versions": VERSIONS,
            "environment": ENVIRONMENT,
            "predicted": 3,
            "confidence": confidence,
            **more,
        }
    )


def image(seed=0, side=32):
    """A picture that nobody else has."""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
