"""Cost of a QAT step against a float training step of the same model, interleaved ABBA so that drift cancels.

python tests/bench/qat_step.py [ARCHITECTURE ...] [--size 64] [--batch 64] [--steps 6] [--threads 1]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import FOLDER, conditions, parser, write
from torch import nn

from tasks.nn.arch import Architecture
from tasks.nn.calibrate import calibrate
from tasks.nn.distill import classification_loss, distillation_loss
from tasks.nn.optim import build_optimizer, default_options
from tasks.nn.quantized import QuantizedModel

CLASSES = 10


def training_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, teacher: nn.Module | None
) -> Callable[[], None]:
    """One optimiser step on a fixed batch, as `tasks.nn.loop` takes it."""
    optimizer = build_optimizer(model, learning_rate=1e-4, weight_decay=0.0, options=default_options)
    model.train()

    def step() -> None:
        logits = model(images)
        loss = classification_loss(logits, labels, label_smoothing=0.1)
        if teacher is not None:
            with torch.no_grad():
                soft = teacher(images)
            loss = loss + distillation_loss(logits, soft, temperature=4.0)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def seconds(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def bench(name: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """Median times of a float step, a QAT step and a QAT step with distillation, and their ratios."""
    torch.manual_seed(0)
    channels_last = {"memory_format": torch.channels_last}
    float_model, teacher = (Architecture(name=name, num_classes=CLASSES).build().eval() for _ in range(2))
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size).to(**channels_last)
    labels = torch.randint(CLASSES, (arguments.batch,))
    quantized = QuantizedModel(float_model, ("first", "last"))
    calibrate(quantized.graph, lambda: iter([images]), "max_abs")
    graph = quantized.graph.to(**channels_last)
    float_model.to(**channels_last)
    teacher.to(**channels_last)
    steps = {
        "float": training_step(float_model, images, labels, None),
        "qat": training_step(graph, images, labels, None),
        "qat_distilled": training_step(graph, images, labels, teacher),
    }
    times: dict[str, list[float]] = {key: [] for key in steps}
    for step in steps.values():
        step()  # warm-up
    for _ in range(arguments.steps):
        for key in (*steps, *reversed(steps)):
            times[key].append(seconds(steps[key]))
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "architecture": name,
        **{f"{key} ms": 1e3 * value for key, value in medians.items()},
        "qat / float": medians["qat"] / medians["float"],
        "qat_distilled / float": medians["qat_distilled"] / medians["float"],
        "n": 2 * arguments.steps,
    }


def main() -> None:
    """Parse, measure, write the result."""
    asked_for = parser(__doc__)
    defaults = ["mobilenet_v3_small", "mobilenet_v2", "resnet18"]
    asked_for.add_argument("architectures", nargs="*", default=defaults)
    asked_for.add_argument("--size", type=int, default=64)
    asked_for.add_argument("--batch", type=int, default=64)
    asked_for.add_argument("--steps", type=int, default=6)
    asked_for.add_argument("--threads", type=int, default=1)
    asked_for.add_argument("--out", type=Path, default=FOLDER / "qat_step.json")
    chosen = asked_for.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = [bench(architecture, chosen) for architecture in chosen.architectures]
    write(
        chosen.out,
        {
            "title": "A step of quantisation-aware training against a float step",
            "command": "python tests/bench/qat_step.py",
            "text": "Medians of n steps on one batch, interleaved ABBA. The budget is 2.5 times;"
            " `qat_distilled` also runs the float teacher.",
            "conditions": conditions(threads=chosen.threads, size_px=chosen.size, batch=chosen.batch),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
