"""Calls that give a view or a copy, by how a tensor lies in memory, where somebody writes into it.

    y = x * w
    y.flatten().mul_(3)    # y changes where flatten gave a view: where x lies row by row

The answer is that of the memory layout, as with `x.is_contiguous()`. It matters where the memory of
either side is written, and only then: most models reshape, and few write through what they got.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# a view or a copy, by the strides of what they are given
_VIEW_OR_COPY = ("contiguous", "flatten", "ravel", "reshape", "reshape_as")
_READS_STRIDES = ("as_strided",)


class Sharing(TorchFunctionMode):
    """Within it, notes each call that gives a view or a copy, and what is written."""

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
        if name in (*_VIEW_OR_COPY, *_READS_STRIDES) and given and isinstance(made, torch.Tensor):
            self._calls.append((name, given[0], made))
        return made

    def answers(self) -> list[tuple[str, Any]]:
        """Each call, and whether its result shares the memory of what it was given; for
        `as_strided` the strides of that."""
        with torch._C.DisableTorchFunction():
            return [
                (name, _memory(x) == _memory(y) if name in _VIEW_OR_COPY else tuple(x.stride()))
                for name, x, y in self._calls
            ]

    def matter(self) -> list[int]:
        """The numbers of the calls whose answer changes what the forward computes."""
        written = {_memory(x) for x in self._written}
        return [
            i
            for i, (name, x, y) in enumerate(self._calls)
            if name in _READS_STRIDES or not written.isdisjoint((_memory(x), _memory(y)))
        ]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, torch.Tensor))


def _version(x: torch.Tensor) -> int | None:
    """How often the memory of a tensor was written; None where torch does not count."""
    with torch._C.DisableTorchFunction():
        return None if x.is_inference() else x._version


def _memory(x: torch.Tensor) -> int:
    """The memory of a tensor, as a number."""
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()._cdata


__all__ = ["Sharing"]
