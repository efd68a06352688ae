"""Supports versions of transformers whose mask functions take `cache_position`, i64[Q].

In later versions they take the number of queries and an offset. A model computes `cache_position`
as `torch.arange(0, Q)` unless it is passed one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]

offsets_hidden = (
    "cache_position is not torch.arange(tokens), and transformers reads it only where the "
    "attention mask hides a token; fix: leave cache_position out"
)


class Counted(TorchFunctionMode):
    """A mode that remembers the results of `torch.arange(n)` and `torch.arange(0, n)`."""

    def __init__(self) -> None:
        super().__init__()
        self._ranges: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.arange and _counts_from_zero(*args, **(kwargs or {})):
            self._ranges[id(result)] = (result, result._version)
        return result

    def from_zero(self, positions: torch.Tensor) -> bool:
        """Returns whether `positions` is such a result, and has not been written into since."""
        _, version = self._ranges.get(id(positions), (None, -1))
        return version == positions._version


def _counts_from_zero(*args: Any, start: Any = 0, step: Any = 1, **_: Any) -> bool:
    start = args[0] if len(args) > 1 else start
    step = args[2] if len(args) > 2 else step
    return type(start) is int and start == 0 and type(step) is int and step == 1


@functools.cache
def given_to_masks() -> bool:
    """Returns whether this version's mask functions take `cache_position`."""
    from transformers import masking_utils

    return "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters


def broadcast(original: Function, added: bool, kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns the mask b[B,1,Q,K] (f if `added`) of any mask function. Evaluates functions of
    transformers by broadcasting; only a user's own may need `torch.vmap`, which no graph holds."""
    positions, function = kwargs.get("cache_position"), kwargs["mask_function"]
    if not _is_elementwise(function):
        return original(**kwargs)
    if positions is None or "use_vmap" in kwargs:
        return original(**{**kwargs, "use_vmap": False} if "use_vmap" in kwargs else kwargs)
    from transformers import masking_utils

    size, length, offset = kwargs["batch_size"], kwargs["kv_length"], kwargs.get("kv_offset", 0)
    padding = kwargs.get("attention_mask")
    if padding is not None:
        padding = F.pad(padding.to(torch.bool), (0, max(0, length + offset - padding.shape[-1])))
        hidden = masking_utils.padding_mask_function(padding)
        function = masking_utils.and_masks(function, hidden)
    rows, keys = (torch.arange(n, device=positions.device) for n in (size, length))
    mask = function(
        rows[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.long, device=positions.device),
        positions[None, None, :, None],
        (keys + offset)[None, None, None, :],
    )
    mask = mask.expand(size, 1, positions.shape[0], length)
    if not added:
        return mask
    dtype = kwargs.get("dtype", torch.float32)
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _is_elementwise(function: Any) -> bool:
    """Returns whether a mask function, and all that it is composed of, is transformers' own. These
    are written for single indices, but their comparisons and lookups accept tensors."""
    return all(_is_own(f) for f in _functions_in(function))


def _functions_in(function: Any) -> Iterator[Any]:
    yield function
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for one in held if isinstance(held, (tuple, list)) else (held,):
            if callable(one):
                yield from _functions_in(one)


def _is_own(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith("transformers.")


__all__ = ["Counted", "broadcast", "given_to_masks", "offsets_hidden"]
