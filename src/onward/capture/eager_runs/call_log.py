"""The functions that a run in eager mode calls, each with its arguments: two runs are compared.

A tensor is told by the call that made it, and by the last one that wrote into its memory. What only
changes a tensor's type is no call, and its result is the same tensor; but where it is a copy in one
run and not in the other, what is written into one of the two is seen in the other only here.
"""

from __future__ import annotations

import weakref
from itertools import zip_longest
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

# `contiguous`: kernels of another type may lay out their results otherwise
_CONVERSIONS = frozenset(
    {
        "to", "float", "half", "bfloat16", "double", "type", "type_as", "as_tensor", "asarray",
        "contiguous",
    }
)  # fmt: skip
_LIMITS = frozenset(
    sign * torch.finfo(dtype).max
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for sign in (1, -1)
)
_NEAR = 0.01  # of a number: what is read off a tensor of fewer bits is off by so much
_PLAIN = (bool, int, float, complex, str, type(None))

Call = tuple[Any, ...]


class CreatedTensor(int):
    """A tensor, by the number of those that were there before it."""


class CallLog(TorchFunctionMode):
    """calls: within it, those of this thread. given: tensors that the run takes."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.calls: list[Call] = []
        # what is told of a tensor, and how many calls there were then
        self._labels: Any = WeakIdKeyDictionary()
        self._writes: dict[int, tuple[StorageWeakRef, int]] = {}  # the last call, by storage
        self._count = 0
        for tensor in given:
            self._number(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, leaves = _name(func), pytree.tree_leaves((args, kwargs))
        told = [self._told(x) for x in leaves]
        taken = [x for x in leaves if isinstance(x, torch.Tensor)]
        before = [_version(x) for x in taken]
        result = func(*args, **kwargs)
        made = [y for y in pytree.tree_leaves(result) if isinstance(y, torch.Tensor)]
        if name in _CONVERSIONS and taken:
            for y in made:
                self._labels[y] = told[0], len(self.calls)
            return result
        written = [x for x, n in zip(taken, before, strict=True) if _version(x) != n]
        written += [x for x in taken[:1] if _writes(name)]
        if made or written:
            self.calls.append((name, *told))
        for x in written:
            storage = StorageWeakRef(x.untyped_storage())  # which keeps its address from others
            self._writes[storage.cdata] = storage, len(self.calls)
        for y in made:
            if not any(y is x for x in taken):
                self._number(y)
        return result

    def _number(self, tensor: torch.Tensor) -> None:
        self._labels[tensor] = CreatedTensor(self._count), len(self.calls)
        self._count += 1

    def _told(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            label, since = self._labels.get(x) or (weakref.ref(x), -1)
            last = self._last_write(x)
            return (label, last) if last > since else label
        if isinstance(x, slice):
            return (self._told(x.start), self._told(x.stop), self._told(x.step))
        return x if isinstance(x, _PLAIN) else "..."

    def _last_write(self, tensor: torch.Tensor) -> int:
        if not self._writes or tensor.layout != torch.strided:
            return -1
        return self._writes.get(tensor.untyped_storage()._cdata, (None, -1))[1]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _writes(name: str) -> bool:
    """Whether a call of this name writes its first operand, where no version says it."""
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    own = name.endswith("_") and not name.endswith("__")
    return in_place or own or name == "__setitem__" or name.endswith("__set__")


def difference(a: CallLog, b: CallLog) -> tuple[str, str] | None:
    """The first call in which the runs differ, of each. Tensors that no call made have to be the
    same, but for those that are gone after both runs."""
    for x, y in zip_longest(a.calls, b.calls):
        if x is None or y is None or not _alike(x, y):
            texts = _text(x), _text(y)
            return (texts[0], f"{texts[0]} of other tensors") if texts[0] == texts[1] else texts
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
    shown = [repr(x) for x in call[1:] if type(x) in _PLAIN and x is not None]
    return f"{call[0]}({', '.join(shown[:4])})"


__all__ = ["CallLog", "difference"]
