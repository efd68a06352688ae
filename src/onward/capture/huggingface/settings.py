"""Reads and checks settings of Hugging Face models: attention implementation, key/value cache."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import torch

from onward.errors import CaptureError

CACHE = "a cache of keys and values is in use (generation)"
_FLASH_LENGTHS = ("max_length_q", "max_length_k")  # transformers' FlashAttentionKwargs


def configs_with_sdpa(model: torch.nn.Module) -> list[Any]:
    """Returns the distinct configs in the model whose attention implementation is sdpa or eager."""
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
            f"a 4-dim attention mask of {mask.dtype} is added to the scores by "
            'attn_implementation="eager"; fix: attn_implementation="sdpa", or a float mask '
            "(0 to attend, -inf to hide)"
        )


def forward_defaults(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the keyword arguments that a capture adds: `use_cache=False` where the model would
    return a key/value cache, which no graph holds."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    if takes and "use_cache" not in kwargs and keeps_cache(model):
        return {"use_cache": False}
    return {}


def is_cache(x: Any) -> bool:
    """Returns whether x is a transformers key/value cache."""
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(x, caches.Cache)


def cache_is_pointless(args: Sequence[Any], kwargs: Mapping[str, Any], gradients: bool) -> bool:
    """Returns whether a key/value cache is of no use to a call, which is no step of generation:
    gradients are asked for, or labels are passed."""
    given = (kwargs, *args, *kwargs.values())
    return gradients or any(isinstance(x, Mapping) and x.get("labels") is not None for x in given)


def keeps_cache(model: torch.nn.Module) -> bool:
    """Returns whether any configuration in the model has `use_cache` on; in T5 only the decoder's
    has."""
    if getattr(getattr(model, "config", None), "use_cache", False):
        return True
    return any(map(_is_on, _configs(map(vars, model.modules()))))


class CacheSetting:
    """`keeps_cache` for one model, fast enough for every call: it walks the modules again only if
    they, or their `config` objects, are not the same as before."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._children: list[Any] = []  # the dict `_modules` of each module
        self._views: list[Any] = []  # the live `values()` of each of these
        self._held: list[Any] = []  # the submodules in them at the last walk
        self._of_modules: list[Any] = []  # the configuration of each module, or None
        self._configs: list[Any] = []  # the distinct ones

    def is_on(self, model: torch.nn.Module) -> bool:
        if getattr(getattr(model, "config", None), "use_cache", False):
            return True
        if not self._is_met(model):
            self._look(model)
        return any(map(_is_on, self._configs))  # a field is read at each call

    def _look(self, model: torch.nn.Module) -> None:
        self._modules = list(model.modules())
        states = list(map(vars, self._modules))
        self._children = list(map(_children, states))
        self._views = [children.values() for children in self._children]
        self._held = list(chain.from_iterable(self._views))
        self._of_modules = list(_configs(states))
        self._configs = list({id(c): c for c in self._of_modules if c is not None}.values())

    def _is_met(self, model: torch.nn.Module) -> bool:
        if not self._modules or self._modules[0] is not model:
            return False
        states = list(map(vars, self._modules))
        return (
            all(map(is_, map(_children, states), self._children))
            and sum(map(len, self._children)) == len(self._held)
            and all(map(is_, chain.from_iterable(self._views), self._held))
            and all(map(is_, _configs(states), self._of_modules))
        )


_children = itemgetter("_modules")


def _configs(states: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return map(dict.get, states, repeat("config"))


def _is_on(config: Any) -> bool:
    return getattr(config, "use_cache", False) is True


def without_flash_lengths(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments without the maximum lengths of packed documents, if only flash
    attention would read them: they are numbers, and each value would be another capture."""
    found = {name for name in _FLASH_LENGTHS if isinstance(kwargs.get(name), int)}
    config = getattr(model, "config", None)
    if not found or getattr(config, "_attn_implementation", None) not in ("sdpa", "eager"):
        return dict(kwargs)
    if found & inspect.signature(model.forward).parameters.keys():
        return dict(kwargs)  # the model's forward may read them itself
    return {name: value for name, value in kwargs.items() if name not in found}


__all__ = [
    "CACHE",
    "CacheSetting",
    "cache_is_pointless",
    "configs_with_sdpa",
    "forward_defaults",
    "is_cache",
    "keeps_cache",
    "require_mask",
    "without_flash_lengths",
]
