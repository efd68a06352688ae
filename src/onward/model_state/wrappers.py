"""Finds the model within a wrapper, such as `onward.Module`."""

from __future__ import annotations

from typing import Any

import torch

SLOT = "_onward_model"  # where a wrapper's class keeps the model


def unwrapped(module: Any) -> Any:
    """Returns the model within any wrappers around it; any other object unchanged."""
    while isinstance(module, torch.nn.Module):
        slot = getattr(type(module), SLOT, None)
        if slot is None:
            return module
        module = slot.__get__(module)
    return module


__all__ = ["SLOT", "unwrapped"]
