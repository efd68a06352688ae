"""What stands for a model without being one: `onward.Module`."""

from __future__ import annotations

from typing import Any

import torch

SLOT = "_onward_model"  # where a wrapper's class keeps the model


def unwrapped(module: Any) -> Any:
    """The model within the wrappers around it; what is no wrapper as it is."""
    while isinstance(module, torch.nn.Module):
        slot = getattr(type(module), SLOT, None)
        if slot is None:
            return module
        module = slot.__get__(module)
    return module


__all__ = ["SLOT", "unwrapped"]
