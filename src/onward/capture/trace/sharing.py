"""Records calls that return a view or a copy depending on the memory layout of their input.

    y = x * w
    y.flatten().mul_(3)    # changes y if flatten returned a view: if y is contiguous

Such a call depends on the layout as `x.is_contiguous()` does, but it only matters if the memory of
its input or result is written: most models reshape, and few write through the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onward.capture.masked_rows import is_tensor

# functions that return a view or a copy, depending on the strides of their input
_VIEW_OR_COPY = ("contiguous", "flatten", "ravel", "reshape", "reshape_as")
_READS_STRIDES = ("as_strided",)


class Sharing(TorchFunctionMode):
    """A mode that records each call that returns a view or a copy, and each tensor written."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._written: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        before = [_version(x) for x in given]
        made = func(*args, **kwargs)
        self._written += [
            x for x, n in zip(given, before, strict=True) if n is not None and _version(x) != n
        ]
        name = getattr(func, "__name__", "")
        if name in (*_VIEW_OR_COPY, *_READS_STRIDES) and given and is_tensor(made):
            self._calls.append((name, given[0], made))
        return made

    def answers(self) -> list[tuple[str, Any]]:
        """Returns for each call its name and whether its result shares its input's memory; for
        `as_strided` the strides of its input instead."""
        with torch._C.DisableTorchFunction():
            return [
                (name, _memory(x) == _memory(y) if name in _VIEW_OR_COPY else tuple(x.stride()))
                for name, x, y in self._calls
            ]

    def matter(self) -> list[int]:
        """Returns the indices of the calls whose answer changes what the forward computes."""
        written = {_memory(x) for x in self._written}
        return [
            i
            for i, (name, x, y) in enumerate(self._calls)
            if name in _READS_STRIDES or not written.isdisjoint((_memory(x), _memory(y)))
        ]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among arguments, and in lists among them."""
    for value in values:
        if is_tensor(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from filter(is_tensor, value)


def _version(x: torch.Tensor) -> int | None:
    """Returns how often a tensor was written; None for inference tensors, which do not count."""
    with torch._C.DisableTorchFunction():
        return None if x.is_inference() else x._version


def _memory(x: torch.Tensor) -> int:
    """Returns an identifier of a tensor's storage."""
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()._cdata


__all__ = ["Sharing"]
