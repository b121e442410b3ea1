"""How a model is trained: the parameters of `fit`, shared by training, fine-tuning and QAT."""

from pydantic import Field

from tasks.nn.amp import Amp
from tasks.nn.augment import AugmentConfig
from tasks.stage import Params


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
    """Batch-norm momentum while training, restored afterwards; None keeps the model's own. torchvision's
    MobileNetV3 has 0.01, with which the statistics of a run of a few hundred steps never arrive."""
    augment: AugmentConfig = AugmentConfig()
    distill: DistillConfig = DistillConfig()
    amp: Amp = "off"
    """off; bf16; auto: the faster of the two in a short measurement. A measured choice may differ between two
    builds of one commit, so it has to be asked for."""
    seed: int = Field(default=0, ge=0)
