"""Logits as probabilities."""

import numpy as np
import numpy.typing as npt


def softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Probabilities of finite logits [classes], without overflow."""
    wide = logits.astype(np.float64)
    shifted = np.exp(wide - wide.max())
    probabilities: npt.NDArray[np.float64] = shifted / shifted.sum()
    return probabilities
