"""Automatic mixed precision where it is faster: bf16 helps large convolutions and hurts depthwise ones on CPUs."""

import statistics
import time
from typing import Literal, Protocol

import torch

Amp = Literal["auto", "off", "bf16"]

_STEPS = 20


class Step(Protocol):
    """One training step that changes nothing."""

    def __call__(self, *, bf16: bool) -> None: ...


def choose_bf16(amp: Amp, step: Step) -> bool:
    """Whether to train in bf16: as told, or by alternating 10 steps of each kind and comparing the medians."""
    if amp != "auto":
        return amp == "bf16"
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index in range(_STEPS + 2):  # the first of each kind warms up and is dropped
        bf16 = index % 2 == 1
        started = time.perf_counter()
        step(bf16=bf16)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[bf16].append(time.perf_counter() - started)
    return statistics.median(seconds[True][1:]) < statistics.median(seconds[False][1:])
