"""The amount of memory that a model's step is planned for."""

from __future__ import annotations

from typing import Protocol

import torch

from onward.memory_amounts import LAYERS, Amount


class Recomputes(Protocol):
    """Options that say what is recomputed in backward."""

    @property
    def memory_budget(self) -> Amount: ...

    @property
    def recompute(self) -> str: ...


def planned_amount(options: Recomputes, model: torch.nn.Module) -> Amount:
    """The amount of memory to plan a step of this model for. `recompute="auto"` computes layers
    again where the model is set to do so in eager mode: by `gradient_checkpointing_enable()` of
    transformers, which sets `gradient_checkpointing` of modules."""
    if options.memory_budget is not None:
        return options.memory_budget
    asked = options.recompute == "auto" and any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    )
    return LAYERS if asked or options.recompute == LAYERS else None


__all__ = ["planned_amount"]
