"""Settings of a Hugging Face model that a capture reads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onward.config import CaptureError

CACHE = "a cache of keys and values is in use (generation)"
_FLASH_LENGTHS = ("max_length_q", "max_length_k")  # transformers' FlashAttentionKwargs


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


def is_cache(x: Any) -> bool:
    """Whether it is what a transformers model keeps from one call of a generation to the next."""
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(x, caches.Cache)


def cache_is_pointless(args: Sequence[Any], kwargs: Mapping[str, Any], gradients: bool) -> bool:
    """Whether nobody generates by this call: gradients are asked for, or labels are given."""
    given = (kwargs, *args, *kwargs.values())
    return gradients or any(isinstance(x, Mapping) and x.get("labels") is not None for x in given)


def without_flash_lengths(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments but for the longest lengths of packed documents (numbers, others with
    every batch), where attention is none that reads them; each would be a graph of its own."""
    found = {name for name in _FLASH_LENGTHS if isinstance(kwargs.get(name), int)}
    config = getattr(model, "config", None)
    if not found or getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return dict(kwargs)
    if found & inspect.signature(model.forward).parameters.keys():
        return dict(kwargs)  # a forward of its own, which may read them
    return {name: value for name, value in kwargs.items() if name not in found}


__all__ = [
    "CACHE",
    "cache_is_pointless",
    "configs_with_sdpa",
    "forward_defaults",
    "is_cache",
    "require_mask",
    "without_flash_lengths",
]
