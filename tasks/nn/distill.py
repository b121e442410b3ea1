"""What a training step minimises: cross-entropy, and a teacher's soft labels where there is one."""

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it


def classification_loss(
    logits_NC: torch.Tensor, labels_N: torch.Tensor, *, label_smoothing: float
) -> torch.Tensor:
    """Mean cross-entropy in nats."""
    return F.cross_entropy(logits_NC, labels_N, label_smoothing=label_smoothing)


def distillation_loss(
    logits_NC: torch.Tensor, teacher_NC: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """T² · KL(teacher ‖ student) of the softened distributions, mean over the batch.

    Source: Hinton, Vinyals, Dean 2015. T² keeps the gradient's size independent of the temperature.
    """
    student = F.log_softmax(logits_NC / temperature, dim=1)
    teacher = F.log_softmax(teacher_NC / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
