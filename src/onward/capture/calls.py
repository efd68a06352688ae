"""The functions that a run in eager mode calls, each with its arguments: two runs are compared.

A tensor is told by the call that made it. What only changes a tensor's type is no call, and its
result is the same tensor.
"""

from __future__ import annotations

import weakref
from itertools import zip_longest
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

# `contiguous`: kernels of another type may lay out their results otherwise
_CONVERSIONS = frozenset(
    {"to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous"}
)
_LIMITS = frozenset(
    sign * torch.finfo(dtype).max
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for sign in (1, -1)
)
_NEAR = 0.01  # of a number: what is read off a tensor of fewer bits is off by so much
_PLAIN = (bool, int, float, complex, str, type(None))

Call = tuple[Any, ...]


class Made(int):
    """A tensor, by the number of those that were there before it."""


class Calls(TorchFunctionMode):
    """calls: within it, those of this thread. given: tensors that the run takes."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._numbers: Any = WeakIdKeyDictionary()
        self._count = 0
        for tensor in given:
            self._number(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        told = [self._told(x) for x in pytree.tree_leaves((args, kwargs))]
        result = func(*args, **kwargs)
        made = [y for y in pytree.tree_leaves(result) if isinstance(y, torch.Tensor)]
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if name in _CONVERSIONS and isinstance(told[0], Made):
            for y in made:
                self._numbers[y] = told[0]
        elif made or writes:
            self.calls.append((name, *told))
            for y in made:
                if not writes:
                    self._number(y)
        return result

    def _number(self, tensor: torch.Tensor) -> None:
        self._numbers[tensor] = Made(self._count)
        self._count += 1

    def _told(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            number = self._numbers.get(x)
            return weakref.ref(x) if number is None else number
        if isinstance(x, slice):
            return (self._told(x.start), self._told(x.stop), self._told(x.step))
        return x if isinstance(x, _PLAIN) else "..."


def difference(a: Calls, b: Calls) -> tuple[str, str] | None:
    """The first call in which the runs differ, of each. Tensors that no call made have to be the
    same, but for those that are gone after both runs."""
    for x, y in zip_longest(a.calls, b.calls):
        if x is None or y is None or not _alike(x, y):
            texts = _text(x), _text(y)
            return (texts[0], "it takes other tensors") if texts[0] == texts[1] else texts
    return None


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return f"{func.__self__.__name__}.{name}" if name in ("__get__", "__set__") else name


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(map(_alike, x, y))
    if isinstance(x, weakref.ref) and isinstance(y, weakref.ref):
        return x() is y()
    if isinstance(x, float) and isinstance(y, float):
        return x == y or abs(x - y) <= _NEAR * abs(y) or (x in _LIMITS and y in _LIMITS)
    return type(x) is type(y) and x == y


def _text(call: Call | None) -> str:
    if call is None:
        return "nothing"
    shown = [repr(x) for x in call[1:] if isinstance(x, _PLAIN) and x is not None]
    return f"{call[0]}({', '.join(shown[:4])})"


__all__ = ["Calls", "difference"]
