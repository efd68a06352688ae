"""Settings of a Hugging Face model that a capture reads."""

from __future__ import annotations

from typing import Any

import torch

from onward.config import CaptureError


def configs_with_sdpa(model: torch.nn.Module) -> list[Any]:
    """The distinct configs in the model whose attention is torch's sdpa or written out (eager)."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in ("sdpa", "eager"):
            found[id(config)] = config
    return list(found.values())


def require_mask(model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raises CaptureError for a mask that eager attention would add as ones and zeros."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.is_floating_point():
        return
    if any(c._attn_implementation == "eager" for c in configs_with_sdpa(model)):
        raise CaptureError(
            f"an attention mask of {mask.dtype} with four dims is added to the scores by "
            'attn_implementation="eager"; fix: use "sdpa", or give the numbers to add as floats'
        )


def forward_defaults(model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments a capture adds: `use_cache=False`, since a cache is not a tensor."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False) and "use_cache" not in kwargs:
        return {"use_cache": False}
    return {}


__all__ = ["configs_with_sdpa", "forward_defaults", "require_mask"]
