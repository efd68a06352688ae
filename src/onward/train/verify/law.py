"""The law of equal numbers: how far one tensor may be from an fp64 run of eager PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Law:
    """The distance allowed: `times |eager - exact| + floor |exact|`, with eager run in the
    precision of the step.

    times: larger in mixed precision, where a relu whose sign rounds the other way is a rare, large
    error of either engine. tensor, number: the floors of a tensor and of a scalar, which eager may
    get exactly right by chance. roundoff: the relative noise of a result that is zero because terms
    cancel. close: the relative change of weights in further draws, large enough that they round
    differently.
    """

    times: float
    tensor: float
    number: float
    roundoff: float
    close: float

    def floor(self, exact: torch.Tensor) -> float:
        """The floor that applies to `exact`, relative to its norm."""
        return self.number if exact.dim() == 0 else self.tensor

    def allowed(self, eager: torch.Tensor, exact: torch.Tensor) -> float:
        """The largest distance from `exact` (fp64) that is allowed where eager PyTorch gave
        `eager`."""
        return self.times * distance(eager, exact) + self.floor(exact) * float(exact.norm())


FP32 = Law(2.0, 1e-7, 2.4e-7, 2.0**-24, 1e-3)


def mixed(low: torch.dtype) -> Law:
    """The law for products computed in `low`, with eager PyTorch under autocast."""
    eps = torch.finfo(low).eps
    return Law(3.0, FP32.tensor, eps / 16, eps / 2, 2 * eps)


def allowed_difference(eager: torch.Tensor, exact: torch.Tensor) -> float:
    """The distance that the law of fp32 allows."""
    return FP32.allowed(eager, exact)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """`|found - exact|`; NaN where shapes differ."""
    if found.shape != exact.shape:
        return math.nan
    return float((found.double() - exact).norm())


__all__ = ["FP32", "Law", "allowed_difference", "distance", "mixed"]
