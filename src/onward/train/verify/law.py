"""The law of same numbers: how far one tensor may be from an fp64 run of eager PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Law:
    """`times |eager - exact| + floor |exact|`, where eager runs in the precision of the step.

    times: more in mixed precision, where a relu whose sign rounds the other way is a rare and large
    error, in either engine. tensor, number: the floors of a tensor and of a single number, on which
    eager may be exact by luck. roundoff: what is zero is noise of this size on the terms that
    cancel. close: how far the weights of further draws are from the model's, relatively: far enough
    that they round anew.
    """

    times: float
    tensor: float
    number: float
    roundoff: float
    close: float

    def floor(self, exact: torch.Tensor) -> float:
        """What is allowed of a tensor's own norm beside eager's distance."""
        return self.number if exact.dim() == 0 else self.tensor

    def allowed(self, eager: torch.Tensor, exact: torch.Tensor) -> float:
        """The largest distance of a tensor from its fp64 run, where eager PyTorch gave `eager`."""
        return self.times * distance(eager, exact) + self.floor(exact) * float(exact.norm())


FP32 = Law(2.0, 1e-7, 2.4e-7, 2.0**-24, 1e-3)


def mixed(low: torch.dtype) -> Law:
    """Where products are computed in `low`, and eager PyTorch runs under autocast."""
    eps = torch.finfo(low).eps
    return Law(3.0, FP32.tensor, eps / 16, eps / 2, 2 * eps)


def allowed_difference(eager: torch.Tensor, exact: torch.Tensor) -> float:
    """By the law of fp32."""
    return FP32.allowed(eager, exact)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """`|found - exact|`; NaN where shapes differ."""
    if found.shape != exact.shape:
        return math.nan
    return float((found.double() - exact).norm())


__all__ = ["FP32", "Law", "allowed_difference", "distance", "mixed"]
