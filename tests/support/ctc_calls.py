"""Labels and lengths of sample calls of CTCLoss."""

from __future__ import annotations

from typing import Any

import numpy as np


def whole(x: Any, attrs: dict[str, Any], shape: tuple[int, ...], i: int) -> np.ndarray:
    """Input `i` of log-probabilities of shape x: labels other than the blank, some twice; lengths
    that leave a path, and a sample of none."""
    if i == 1:
        classes = [n for n in range(x[2]) if n != attrs["blank"]]
        return np.array(classes)[np.arange(np.prod(shape)) // 2 % len(classes)].reshape(shape)
    if i == 2:
        return np.maximum(x[0] - np.arange(shape[0]), 1)
    return np.minimum(np.arange(shape[0])[::-1], (x[0] - shape[0]) // 2 + 1).clip(0)
