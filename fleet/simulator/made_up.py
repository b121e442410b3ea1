"""Three classes and a temperature for whoever has no recordings, all made up: nothing was measured."""

import numpy as np

from fleet.device.degrade.sensors_trace import TracePoint
from fleet.simulator.device_classes import SHARE_OF_TIER, DeviceClass, Range, tier_of
from fleet.simulator.phone import Temperatures

_RANGES_MS = (("fast", 4.0, 6.0, 20.0), ("middling", 18.0, 25.0, 70.0), ("slow", 60.0, 80.0, 190.0))


def made_up_classes() -> tuple[DeviceClass, ...]:
    """One of each tier, called "made up"."""
    classes = []
    for name, low, mean, high in _RANGES_MS:
        latency = Range(min_ms=low, mean_ms=mean, max_ms=high)
        tier = tier_of(latency.median_ms)
        classes.append(
            DeviceClass(
                name=f"made up, {name}",
                soc="none",
                source="made_up",
                latency=latency,
                tier=tier,
                share=SHARE_OF_TIER[tier],
            )
        )
    return tuple(classes)


def made_up_temperatures() -> Temperatures:
    """An hour from 28 to 44 degrees and back."""
    seconds = np.arange(0, 3600, 10)
    celsius = 36.0 - 8.0 * np.cos(2 * np.pi * seconds / 3600)
    return Temperatures(
        [
            TracePoint(
                at_s=float(at_s),
                temperature_c=float(warmth),
                battery_percent=100.0,
                clock_mhz=0.0,
                voltage_mv=0.0,
                ram_used_mb=0.0,
            )
            for at_s, warmth in zip(seconds, celsius, strict=True)
        ]
    )
