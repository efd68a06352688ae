"""Records which attributes of plain objects (a configuration, say) a capture reads.

An attribute that was not read cannot decide a trace, and may change freely: saving a model, for
instance, writes into its configuration. Reads are recorded in `__getattribute__`, for classes
all of whose reads go through it; objects of other classes count as read entirely.
"""

from __future__ import annotations

import abc
import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onward.model_state.code import HEAP_TYPE, module_of, origin, slot_names
from onward.model_state.patches import patched
from onward.model_state.walk import Walk

_GET = "__getattribute__"
# modules of classes with a known `__getattribute__`, which maps some names to others; it reads the
# attributes of `_READ_BY_TURNING` for that
_TURNING = (
    "transformers.configuration_utils",
    "transformers.integrations.heterogeneity.configuration_utils",
)
_READ_BY_TURNING = (
    "attribute_map", "_heterogeneity_spec", "allow_global_per_layer_attribute_access",
)  # fmt: skip
# reads that give all attributes (`vars(x)`, a copy, `dir(x)`), or bypass the record
_OF_ALL = {
    "__dict__", "__dir__", "__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__",
    "_getattr_without_heterogeneous_validation",
}  # fmt: skip
_OTHERWISE = (torch.nn.Module, torch.Tensor)  # classes that a walk treats separately
_ROOM = object.__basicsize__ + 16  # bytes of an object with a dict and weak references alone


class Reads:
    """The attributes that were read, by object. Keeps objects alive, so that no id is reused."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._names: dict[int, tuple[Any, set[str]]] = {id(x): (x, set()) for x in objects}

    def note(self, x: Any, name: str) -> None:
        """Records a read, if `x` is one of the objects."""
        found = self._names.get(id(x))
        if found is not None:
            found[1].add(name)

    def names(self, x: Any) -> frozenset[str] | None:
        """Returns the attributes read of an object; None where all count as read."""
        found = self._names.get(id(x))
        if found is None or found[1] & _OF_ALL:
            return None
        names = found[1]
        turned: Any = getattr(type(x), "attribute_map", None) if _turns(type(x)) else None
        if turned is None:
            return frozenset(names)
        return frozenset([*names, *(turned[n] for n in names if n in turned), *_READ_BY_TURNING])


@contextmanager
def reading(model: Any, loss_fn: Any) -> Iterator[Reads]:
    """A context that records what this thread reads of plain objects reachable from these two."""
    seen = [x for x, _ in Walk(model, loss_fn).plain.values() if _leaves_reads_to_get(type(x))]
    reads = Reads(seen)
    with patched([(cls, _GET, _noting(cls, reads.note)) for cls in {type(x) for x in seen}]):
        yield reads


def _noting(cls: type, note: Any) -> Any:
    plain = getattr(cls, _GET)

    def get(x: Any, name: str) -> Any:
        note(x, name)
        return plain(x, name)

    return get


@functools.lru_cache(maxsize=1024)
def _leaves_reads_to_get(cls: type) -> bool:
    """Returns whether every read of an instance's attributes goes through `__getattribute__`: the
    class and its bases are written in Python, and none replaces or bypasses it."""
    if type(cls) not in (type, abc.ABCMeta) or issubclass(cls, _OTHERWISE):
        return False
    if origin(module_of(cls)) == "opaque" or slot_names(cls) or not cls.__dictoffset__:
        return False
    if cls.__basicsize__ > _ROOM or cls.__itemsize__:
        return False  # a base is written in C
    for c in cls.__mro__[:-1]:
        if not c.__flags__ & HEAP_TYPE:
            return False
        if module_of(c) not in _TURNING and any(map(_goes_by_get, vars(c).items())):
            return False
    return True


def _goes_by_get(item: tuple[str, Any]) -> bool:
    name, x = item
    function = getattr(x, "__func__", None) or getattr(x, "fget", None) or x
    code = getattr(function, "__code__", None)
    return name == _GET or (isinstance(code, types.CodeType) and _GET in code.co_names)


def _turns(cls: type) -> bool:
    return any(module_of(c) in _TURNING for c in cls.__mro__)


__all__ = ["Reads", "reading"]
