"""The one training loop: training, fine-tuning after pruning, quantisation-aware training all run `fit`.

Shape letters: N batch, C classes, H height, W width.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks import tracking
from tasks.data.dataset import Dataset, Split
from tasks.nn import distributed, snapshot
from tasks.nn.amp import bf16_is_faster
from tasks.nn.config import DistillConfig, FitConfig
from tasks.nn.distill import classification_loss, distillation_loss
from tasks.nn.ema import averaged
from tasks.nn.evaluate import Evaluation, evaluate
from tasks.nn.loader import Loader, even_batch
from tasks.nn.optim import OptionsFor, build_optimizer, cosine_rate, default_options, set_learning_rate
from tasks.progress import track

__all__ = ["DistillConfig", "Evaluation", "FitConfig", "FitResult", "evaluate", "fit"]

State = dict[str, torch.Tensor]


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
    """State dict of `epoch`, on the CPU; the averaged weights when EMA is on."""
    epoch: int
    """The epoch whose weights are the result, from 1: the last one that is not worse than the best by more
    than one standard error of the validation accuracy (Breiman et al. 1984). The cosine ends where weights
    are best, and the maximum over noisy epochs of a small split would be a choice by luck."""
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
    """Train `model` on the split `train`, watch `val`, and leave the chosen weights in it.

    The result depends on the arguments only (on the CPU bit for bit, for one number of threads), whether or
    not the training was interrupted and resumed.

    Args:
        model: Images float32 [N, 3, H, W] -> logits [N, C].
        dataset: Its splits train and val are used.
        preprocess: The contract of the input.
        config: How to train.
        teacher: A trained model with the same classes; its soft labels join the loss by `config.distill`.
        run: Where the curves go, one point an epoch.
        description: Names the curves and the progress bar.
        resume: Where the state of each finished epoch is kept, and taken up again after a kill; deleted at
            the end. It must not be an out of the stage, which DVC deletes first.
        options: Learning-rate factor and weight decay of each parameter by name.

    Raises:
        UserError: train has fewer than two images, val none, one has no label, the batch cannot be shared out
            among the processes, or the loss is not finite.
    """
    train, val = dataset.split("train"), dataset.split("val")
    unlabelled = int((train.labels < 0).sum() + (val.labels < 0).sum())
    if len(train) < 2 or len(val) == 0 or unlabelled:
        raise UserError(
            f"dataset {dataset.root} with {len(train)} training and {len(val)} validation images, "
            f"{unlabelled} of them unlabelled",
            allowed="at least 2 training images and 1 validation image, all labelled",
            next_step="add images or change prepare's split shares in params.yaml",
        )
    with _training_mode(model, teacher, config):
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
            self.fingerprint = snapshot.fingerprint(
                {"config": config.model_dump(mode="json"), "preprocess": preprocess.digest()},
                models=[model] if teacher is None else [model, teacher],
                splits=[train, val],
            )
        self.device = next(model.parameters()).device
        self.loader = Loader(
            split=train,
            preprocess=preprocess,
            augment=config.augment,
            batch_size=even_batch(config.batch_size, len(train), distributed.world_size()),
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
        self.kept: State = {}
        self.kept_epoch = 0

    def run(self, run: tracking.Run | None) -> FitResult:
        """Train from the last finished epoch to the end."""
        if not self._restore():
            self.bf16 = self._choose_bf16()
        parallel = DistributedDataParallel(self.model) if distributed.world_size() > 1 else self.model
        for epoch in range(len(self.history), self.config.epochs):
            loss = self._train_epoch(parallel, epoch)
            self._finish_epoch(epoch, loss)
            if run is not None:
                values = {k: v for k, v in asdict(self.history[-1]).items() if k != "epoch"}
                run.metrics({f"{self.description}/{k}": v for k, v in values.items()}, step=epoch + 1)
        self.model.load_state_dict(self.kept)
        if self.resume_file is not None and distributed.rank() == 0:
            self.resume_file.unlink(missing_ok=True)
        return FitResult(
            state=self.kept,
            epoch=self.kept_epoch,
            val_top1=self.history[self.kept_epoch - 1].val_top1,
            history=tuple(self.history),
            bf16=self.bf16,
        )

    def _train_epoch(self, parallel: nn.Module, epoch: int) -> float:
        """One pass over the training split; the mean loss."""
        # Dropout draws from torch's generator: seeded per epoch, an epoch is independent of those before.
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
        """Evaluate, keep the weights if they are good, and make the epoch survive a kill."""
        result = self.model
        distributed.copy_from_first_rank(self.model)
        if self.ema is not None:
            result = self.ema.module
            distributed.copy_from_first_rank(result)
        top1 = evaluate(result, self.val, self.preprocess).top1
        rate = self._rate((epoch + 1) * self.loader.steps - 1)
        self.history.append(Epoch(epoch + 1, loss, top1, rate))
        best = max(entry.val_top1 for entry in self.history)
        if top1 >= best - math.sqrt(best * (1 - best) / len(self.val)):
            self.kept = {k: v.detach().cpu().contiguous().clone() for k, v in result.state_dict().items()}
            self.kept_epoch = epoch + 1
        if self.resume_file is not None and distributed.rank() == 0:
            snapshot.save(self.resume_file, self.fingerprint, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": [asdict(entry) for entry in self.history],
            "kept": self.kept,
            "kept_epoch": self.kept_epoch,
            "bf16": self.bf16,
        }

    def _restore(self) -> bool:
        state = None if self.resume_file is None else snapshot.load(self.resume_file, self.fingerprint)
        if state is None:
            return False
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = [Epoch(**entry) for entry in state["history"]]
        self.kept, self.kept_epoch, self.bf16 = state["kept"], state["kept_epoch"], state["bf16"]
        return True

    def _choose_bf16(self) -> bool:
        if self.config.amp != "auto":
            return self.config.amp == "bf16"
        trial = copy.deepcopy(self.model).train()  # a forward pass moves batch-norm statistics and scales
        images, labels = (tensor.to(self.device) for tensor in next(self.loader.epoch(0)))

        def step(*, bf16: bool) -> None:
            torch.autograd.backward(self._loss(trial, images, labels, bf16=bf16))

        return distributed.from_first_rank(bf16_is_faster(step))


@contextlib.contextmanager
def _training_mode(model: nn.Module, teacher: nn.Module | None, config: FitConfig) -> Iterator[None]:
    """What holds while training only: device, random state, memory layout, batch-norm momentum, mode."""
    modules = [model] if teacher is None else [model, teacher.eval()]
    norms = [norm for norm in model.modules() if isinstance(norm, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    with torch.random.fork_rng():
        for module in modules:
            module.to("cuda" if torch.cuda.is_available() else "cpu")
            # oneDNN's depthwise convolutions run about 1.6 times as fast on channels_last.
            module.to(memory_format=torch.channels_last)
        try:
            for norm in norms:
                norm.momentum = norm.momentum if config.bn_momentum is None else config.bn_momentum
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for module in modules:
                module.to("cpu").to(memory_format=torch.contiguous_format)
            model.eval()
