"""Results under `torch.autocast`, which knows nothing of operators of our own."""

from __future__ import annotations

import torch


def as_product(y: torch.Tensor) -> torch.Tensor:
    """`y` in the type that autocast gives a product, where it is on. Called where a trace records
    the operator: within its fake kernel autocast is off."""
    device = y.device.type
    return y.to(torch.get_autocast_dtype(device)) if _is_cast(y) else y


def as_loss(y: torch.Tensor) -> torch.Tensor:
    """`y` in f32, where autocast is on."""
    return y.float() if _is_cast(y) else y


def _is_cast(y: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(y.device.type) and y.dtype != torch.float64


__all__ = ["as_loss", "as_product"]
