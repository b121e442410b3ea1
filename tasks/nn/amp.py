"""Mixed precision where it is faster: on CPUs bf16 helps large convolutions and hurts depthwise ones."""

import statistics
import time
from typing import Literal, Protocol

import torch

Amp = Literal["auto", "off", "bf16"]

_STEPS = 20


class Step(Protocol):
    """A forward and backward pass whose only trace is its time."""

    def __call__(self, *, bf16: bool) -> None: ...


def bf16_is_faster(step: Step) -> bool:
    """Alternate ten steps in fp32 and ten in bf16 after one of each to warm up, and compare the medians."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for index in range(_STEPS + 2):
        bf16 = index % 2 == 1
        started = time.perf_counter()
        step(bf16=bf16)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[bf16].append(time.perf_counter() - started)
    return statistics.median(seconds[True][1:]) < statistics.median(seconds[False][1:])
