"""Casts results of custom ops as `torch.autocast` would, which does not know these ops."""

from __future__ import annotations

import torch


def as_product(y: torch.Tensor) -> torch.Tensor:
    """Returns `y` in autocast's dtype for products, if autocast is on. To be called where a trace
    records the op: within the op's fake kernel autocast is off."""
    device = y.device.type
    return y.to(torch.get_autocast_dtype(device)) if _is_cast(y) else y


def as_loss(y: torch.Tensor) -> torch.Tensor:
    """Returns `y` in f32, if autocast is on."""
    return y.float() if _is_cast(y) else y


def _is_cast(y: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(y.device.type) and y.dtype != torch.float64


__all__ = ["as_loss", "as_product"]
