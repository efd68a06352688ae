"""The device of a model, which is that of its first parameter."""

from __future__ import annotations

import torch


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU for a model without parameters."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


__all__ = ["device_of"]
