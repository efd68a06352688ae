"""The law of same numbers: how far one tensor may be from an fp64 run of eager PyTorch."""

from __future__ import annotations

import math

import torch

FLOOR = 1e-7  # of the tensor's own norm: what fp32 cannot hold anyway
SCALAR = 2.4e-7  # two units in the last place: on one number eager may be exact by luck


def allowed_difference(eager: torch.Tensor, exact: torch.Tensor) -> float:
    """`2 |eager - exact| + floor |exact|`, both in fp64."""
    return 2.0 * distance(eager, exact) + floor(exact) * float(exact.norm())


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """`|found - exact|`; NaN where shapes differ."""
    if found.shape != exact.shape:
        return math.nan
    return float((found.double() - exact).norm())


def floor(exact: torch.Tensor) -> float:
    """What is allowed of a tensor's own norm beside eager's distance."""
    return SCALAR if exact.dim() == 0 else FLOOR
