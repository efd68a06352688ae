"""Cheaper traces: what `torch.export` computes of each operator and a capture does not read.

Two things are most of it. The results of fake tensors are kept by operator and arguments, for the
next call like it; with symbolic sizes an entry costs about as much as the operator, and a shallow
model never asks for most of them. So an entry is made when a call comes for the second time: the
third layer finds what the second one has left. And of each result its memory format is told, which
takes many comparisons of symbolic sizes, beside the tensor itself, which is all that is read.
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
# what a version of torch has to have, that the first of both be done
_OF_ENTRIES = ("_BypassDispatchCache", "_DispatchCacheBypassEntry", *_KEEPS)


def cheaper() -> Iterator[Patch]:
    """The places to patch while a trace runs; none that this version of torch lacks."""
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
