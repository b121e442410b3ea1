"""The one training loop: training, fine-tuning after pruning, and quantisation-aware training all run through `fit`.

Shape letters: N batch, C classes, H height, W width.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks import tracking
from tasks.data.dataset import Dataset, Split
from tasks.nn import distributed, resume
from tasks.nn.amp import Amp, choose_bf16
from tasks.nn.augment import AugmentConfig
from tasks.nn.distill import classification_loss, distillation_loss
from tasks.nn.ema import averaged
from tasks.nn.evaluate import Evaluation, evaluate
from tasks.nn.loader import Loader
from tasks.nn.optim import OptionsFor, build_optimizer, cosine_rate, default_options, set_learning_rate
from tasks.progress import track
from tasks.stage import Params

__all__ = ["DistillConfig", "Evaluation", "FitConfig", "FitResult", "evaluate", "fit"]

State = dict[str, torch.Tensor]


class DistillConfig(Params):
    """How much a teacher counts; used only when `fit` is given one."""

    alpha: float = Field(default=0.7, ge=0, le=1)
    """Share of the loss that follows the teacher's soft labels; the rest follows the labels."""
    temperature: float = Field(default=4.0, gt=0)
    """Softens both distributions; 3..5 is usual."""


class FitConfig(Params):
    """How a model is trained."""

    epochs: int = Field(ge=1)
    batch_size: int = Field(default=64, ge=2)
    """Images of one step, over all processes together."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak rate of AdamW."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Decoupled decay of kernels and matrices; norms, biases and scales are never decayed."""
    warmup_epochs: float = Field(default=1.0, ge=0)
    """Epochs of linear warm-up; the cosine to zero follows."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay per step of the averaged weights, which are then the result; 0 = no averaging."""
    bn_momentum: float | None = Field(default=0.1, gt=0, le=1)
    """Batch-norm momentum while training, restored afterwards; None keeps the model's own. torchvision's MobileNetV3
    has 0.01, with which the statistics of a run of a few hundred steps never arrive."""
    augment: AugmentConfig = AugmentConfig()
    distill: DistillConfig = DistillConfig()
    amp: Amp = "off"
    """off; bf16; auto: the faster of the two in a short measurement. A measured choice may differ between two builds
    of one commit, so it has to be asked for."""
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True)
class Epoch:
    """One line of the training curves."""

    epoch: int
    """From 1."""
    train_loss: float
    """Mean over the epoch's steps, in nats."""
    val_top1: float
    """0..1."""
    learning_rate: float
    """Of the epoch's last step."""


@dataclass(frozen=True)
class FitResult:
    """What training produced. The model given to `fit` holds `state` too."""

    state: State
    """State dict of the best epoch by val_top1 (the later of equals); averaged weights when EMA is on. On the CPU."""
    val_top1: float
    """Accuracy of `state` on the validation split, 0..1."""
    history: tuple[Epoch, ...]
    bf16: bool
    """Whether the steps ran in bf16 autocast."""


def fit(
    model: nn.Module,
    dataset: Dataset,
    preprocess: Preprocess,
    config: FitConfig,
    *,
    teacher: nn.Module | None = None,
    run: tracking.Run | None = None,
    description: str = "train",
    resume: Path | None = None,
    options: OptionsFor = default_options,
) -> FitResult:
    """Train `model` on the split `train`, watch `val`, and leave the best weights in it.

    The result depends on the arguments only (on the CPU bit for bit, for one number of threads), whether or not the
    training was interrupted and resumed.

    Args:
        model: Images float32 [N, 3, H, W] -> logits [N, C].
        dataset: Its splits train and val are used.
        preprocess: The contract of the input.
        config: How to train.
        teacher: A trained model with the same classes; its soft labels join the loss by `config.distill`.
        run: Where the curves go, one point an epoch.
        description: Names the curves and the progress bar.
        resume: Where the state of each finished epoch is kept, and taken up again after a kill; deleted at the end.
            It must not be an out of the stage, which DVC deletes first.
        options: Learning-rate factor and weight decay of each parameter by name.

    Raises:
        UserError: train has fewer than two images, val none, or the loss stops being a number.
    """
    train, val = dataset.split("train"), dataset.split("val")
    if len(train) < 2 or len(val) == 0:
        raise UserError(
            f"dataset {dataset.root} with {len(train)} training and {len(val)} validation images",
            allowed="at least 2 training images and 1 validation image",
            next_step="add images or change prepare's split shares in params.yaml",
        )
    with _training_mode(model, config):
        trainer = _Trainer(
            model,
            train=train,
            val=val,
            preprocess=preprocess,
            config=config,
            teacher=teacher,
            options=options,
            resume_file=resume,
            description=description,
        )
        return trainer.run(run)


class _Trainer:
    """The state of one training between two epochs, and how to go on."""

    def __init__(
        self,
        model: nn.Module,
        *,
        train: Split,
        val: Split,
        preprocess: Preprocess,
        config: FitConfig,
        teacher: nn.Module | None,
        options: OptionsFor,
        resume_file: Path | None,
        description: str,
    ) -> None:
        self.model, self.teacher, self.val = model, teacher, val
        self.preprocess, self.config = preprocess, config
        self.description, self.resume_file = description, resume_file
        self.fingerprint = ""
        if resume_file is not None:
            self.fingerprint = _fingerprint(
                model, teacher=teacher, train=train, val=val, preprocess=preprocess, config=config
            )
        self.device = next(model.parameters()).device
        if teacher is not None:
            teacher.eval().to(self.device).to(memory_format=torch.channels_last)
        self.loader = Loader(
            split=train,
            preprocess=preprocess,
            augment=config.augment,
            batch_size=min(config.batch_size, len(train)),
            seed=config.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        self.optimizer = build_optimizer(
            model, learning_rate=config.learning_rate, weight_decay=config.weight_decay, options=options
        )
        self.ema: AveragedModel | None = averaged(model, config.ema_decay) if config.ema_decay else None
        self.bf16 = False
        self.history: list[Epoch] = []
        self.best: State = {}

    def run(self, run: tracking.Run | None) -> FitResult:
        """Train from the last finished epoch to the end."""
        if not self._restore():
            self.bf16 = choose_bf16(self.config.amp, self._measured_step)
        parallel = DistributedDataParallel(self.model) if distributed.world_size() > 1 else self.model
        for epoch in range(len(self.history), self.config.epochs):
            loss = self._train_epoch(parallel, epoch)
            self._finish_epoch(epoch, loss)
            if run is not None:
                values = {k: v for k, v in asdict(self.history[-1]).items() if k != "epoch"}
                run.metrics({f"{self.description}/{k}": v for k, v in values.items()}, step=epoch + 1)
        self.model.load_state_dict(self.best)
        if self.resume_file is not None and distributed.rank() == 0:
            self.resume_file.unlink(missing_ok=True)
        return FitResult(
            self.best, max(entry.val_top1 for entry in self.history), tuple(self.history), bf16=self.bf16
        )

    def _train_epoch(self, parallel: nn.Module, epoch: int) -> float:
        """One pass over the training split; the mean loss."""
        # Dropout draws from torch's generator: seeding it per epoch makes an epoch independent of those before.
        seeds = np.random.SeedSequence([self.config.seed, epoch, distributed.rank()])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        parallel.train()
        total = torch.zeros((), device=self.device)
        title = f"{self.description} {epoch + 1}/{self.config.epochs}"
        batches = self.loader.epoch(epoch)
        if distributed.rank() == 0:
            batches = track(batches, title, self.loader.steps)
        for step, (images, labels) in enumerate(batches, start=epoch * self.loader.steps):
            set_learning_rate(self.optimizer, self._rate(step))
            loss = self._loss(parallel, images.to(self.device), labels.to(self.device), bf16=self.bf16)
            self.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update_parameters(self.model)
            total += loss.detach()
        mean = float(total) / self.loader.steps
        if not math.isfinite(mean):
            raise UserError(
                f"{title}: the loss is {mean}",
                allowed="a finite loss",
                next_step=f"lower learning_rate (now {self.config.learning_rate}) or set amp: off",
            )
        return mean

    def _loss(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, bf16: bool
    ) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = model(images)
            if self.teacher is not None:
                with torch.no_grad():
                    soft = self.teacher(images)
        loss = classification_loss(logits.float(), labels, label_smoothing=self.config.label_smoothing)
        if self.teacher is None:
            return loss
        alpha = self.config.distill.alpha
        soft_loss = distillation_loss(
            logits.float(), soft.float(), temperature=self.config.distill.temperature
        )
        return alpha * soft_loss + (1 - alpha) * loss

    def _rate(self, step: int) -> float:
        steps = self.config.epochs * self.loader.steps
        warmup_steps = min(round(self.config.warmup_epochs * self.loader.steps), steps - 1)
        return cosine_rate(step, steps=steps, warmup_steps=warmup_steps, peak=self.config.learning_rate)

    def _finish_epoch(self, epoch: int, loss: float) -> None:
        result = self.model if self.ema is None else self.ema.module
        distributed.copy_from_first_rank(self.model)
        distributed.copy_from_first_rank(result)
        top1 = evaluate(result, self.val, self.preprocess).top1
        if top1 >= max((entry.val_top1 for entry in self.history), default=0.0):
            self.best = {k: v.detach().cpu().contiguous().clone() for k, v in result.state_dict().items()}
        rate = self._rate((epoch + 1) * self.loader.steps - 1)
        self.history.append(Epoch(epoch + 1, loss, top1, rate))
        if self.resume_file is not None and distributed.rank() == 0:
            resume.save(self.resume_file, self.fingerprint, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": [asdict(entry) for entry in self.history],
            "best": self.best,
            "bf16": self.bf16,
        }

    def _restore(self) -> bool:
        state = None if self.resume_file is None else resume.load(self.resume_file, self.fingerprint)
        if state is None:
            return False
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = [Epoch(**entry) for entry in state["history"]]
        self.best, self.bf16 = state["best"], state["bf16"]
        return True

    def _measured_step(self, *, bf16: bool) -> None:
        """A forward and backward pass that leaves no trace but time."""
        images, labels = next(self.loader.epoch(0))
        loss = self._loss(self.model, images.to(self.device), labels.to(self.device), bf16=bf16)
        torch.autograd.backward(loss)
        self.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _training_mode(model: nn.Module, config: FitConfig) -> Iterator[None]:
    """Settings that hold while training only: random state, memory layout, batch-norm momentum, eval mode after."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001 - the common base of 1d, 2d, 3d
    momenta = [norm.momentum for norm in norms]
    with torch.random.fork_rng():
        # oneDNN's depthwise convolutions run about 1.6 times as fast on channels_last.
        model.to("cuda" if torch.cuda.is_available() else "cpu").to(memory_format=torch.channels_last)
        try:
            for norm in norms:
                norm.momentum = norm.momentum if config.bn_momentum is None else config.bn_momentum
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            model.to("cpu").to(memory_format=torch.contiguous_format)
            model.eval()


def _fingerprint(
    model: nn.Module,
    *,
    teacher: nn.Module | None,
    train: Split,
    val: Split,
    preprocess: Preprocess,
    config: FitConfig,
) -> str:
    """Names everything the result depends on, so that only the same training is resumed."""
    parts: Mapping[str, Any] = {
        "model": resume.state_digest(model.state_dict()),
        "teacher": None if teacher is None else resume.state_digest(teacher.state_dict()),
        "data": [[split.sha256, split.labels.tolist()] for split in (train, val)],
        "preprocess": preprocess.digest(),
        "config": config.model_dump(mode="json"),
        "world_size": distributed.world_size(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
