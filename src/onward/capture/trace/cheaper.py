"""Patches that make `torch.export` skip work whose results a capture does not read.

Two costs stand out. First, torch caches the results of fake tensors by operator and arguments; with
symbolic sizes an entry costs about as much as the operator, and a shallow model never reads most of
them. So an entry is made only when a call comes for the second time (the third layer then finds the
entry of the second). Second, torch records each result's memory format, which takes many
comparisons of symbolic sizes, and which a capture does not need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor

from onward.model_state.patches import Patch

_ONCE = "seen once"
_MODE: Any = fake_tensor.FakeTensorMode
_KEEPS = ("_set_cache_key", "_set_cache_key_for_shape_env")
# names that a version of torch needs to have for the first patch
_OF_ENTRIES = ("_BypassDispatchCache", "_DispatchCacheBypassEntry", *_KEEPS)


def cheaper() -> Iterator[Patch]:
    """Yields the patches for a trace, those for which this version of torch has the functions."""
    if hasattr(_MODE, "_make_cache_entry") and all(hasattr(fake_tensor, n) for n in _OF_ENTRIES):
        yield from _kept_the_second_time()
    if hasattr(proxy_tensor, "_extract_tensor_metadata"):
        yield proxy_tensor, "_extract_tensor_metadata", _no_metadata


def _kept_the_second_time() -> Iterator[Patch]:
    found: Any = fake_tensor
    make, bypass = _MODE._make_cache_entry, found._BypassDispatchCache
    seen: set[Any] = set()

    def make_entry(mode: Any, state: Any, key: Any, *call: Any) -> Any:
        if key not in seen:
            seen.add(key)
            raise bypass(_ONCE)
        return make(mode, state, key, *call)

    def keeping(keep: Any) -> Any:
        def set_key(cache: Any, key: Any, entry: Any) -> None:
            if getattr(entry, "reason", None) != _ONCE:
                keep(cache, key, entry)

        return set_key

    yield _MODE, "_make_cache_entry", make_entry
    for name in _KEEPS:
        yield found, name, keeping(getattr(found, name))


def _no_metadata(value: torch.Tensor, *_: Any, **__: Any) -> None:
    return None


__all__ = ["cheaper"]
