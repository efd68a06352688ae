"""Lazy outputs: fields of a Hugging Face ModelOutput that are computed when they are first read.

Fields that no recent caller has read are not computed with the forward. Until every field is there,
the output's class is a subclass, made here, of the model's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from onward.capture.output_tree import Computed, Container, OutputTree

LOSS = "loss"
_WAITS = "_onward_waits"
NOTHING = torch.empty(0)  # a placeholder for fields that are not computed yet


def waiting(tree: OutputTree | None) -> dict[str, str]:
    """The fields of a ModelOutput that can be computed later, with their results: those that are
    one tensor, except the loss and those that share memory. Empty for other outputs."""
    if tree is None or not isinstance(tree.root, Container) or not _is_model_output(tree.root.kind):
        return {}
    root, at_once = tree.root, tree.computed_at_once()
    return {
        key: part.name
        for key, part in zip(root.keys, root.parts, strict=True)
        if isinstance(part, Computed) and key != LOSS and part.name not in at_once
    }


class Waits:
    """The state of a lazy output. fields: the result of each lazy field. absent: fields not
    computed yet. read: a set to which results that are read are added. compute: computes all absent
    fields."""

    def __init__(
        self,
        fields: Mapping[str, str],
        absent: Iterable[str],
        read: set[str],
        compute: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        self.fields, self.absent, self._read, self._compute = fields, set(absent), read, compute
        self._left = set(fields)
        self._lock = threading.RLock()

    def watch(self, output: Any) -> Any:
        """Makes the output lazy, in place, and returns it."""
        vars(output)[_WAITS] = self
        output.__class__ = _class(type(output), tuple(self.fields))
        return output

    def touch(self, output: Any, field: str) -> None:
        """Called before a field is read: if it is absent, computes all absent fields."""
        with self._lock:
            self._read.add(self.fields[field])
            if field in self.absent:
                for name, tensor in self._compute().items():
                    if name in self.absent:
                        OrderedDict.__setitem__(output, name, tensor)
                        vars(output)[name] = tensor
                self.absent.clear()
            self.forget(output, field)

    def forget(self, output: Any, field: str) -> None:
        """Marks a field as no longer lazy; after the last one the output has the model's own class
        again."""
        self.absent.discard(field)
        self._left.discard(field)
        if not self._left and vars(output).pop(_WAITS, None) is not None:
            output.__class__ = type(output).__mro__[1]


def _is_model_output(kind: type) -> bool:
    return any(
        c.__name__ == "ModelOutput" and c.__module__.startswith("transformers.")
        for c in kind.__mro__
    )


@lru_cache(maxsize=64)
def _class(kind: type, fields: tuple[str, ...]) -> type:
    """A subclass of the output's class that calls `Waits.touch` before a field is read in any
    way."""

    def touch(self: Any, names: Iterable[Any]) -> None:
        for name in names:
            waits = vars(self).get(_WAITS)
            if waits is not None and name in waits.fields:
                waits.touch(self, name)

    def field(name: str) -> property:
        def read(self: Any) -> Any:
            touch(self, (name,))
            return vars(self).get(name)

        def write(self: Any, value: Any) -> None:
            vars(self)[name] = value
            waits = vars(self).get(_WAITS)
            if waits is not None:
                waits.forget(self, name)

        return property(read, write)

    def all_touched(method: str) -> Any:
        plain = getattr(kind, method)

        def call(self: Any, *args: Any) -> Any:
            touch(self, fields)
            return plain(self, *args)

        call.__name__ = method
        return call

    def item(self: Any, key: Any) -> Any:
        if not isinstance(key, str):
            names = list(OrderedDict.keys(self))[key]
            if isinstance(names, list):
                return tuple(item(self, name) for name in names)
            key = names
        touch(self, (key,))
        return OrderedDict.__getitem__(self, key)

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return item(self, key) if key in self else default

    base: Any = kind

    def reduce(self: Any) -> Any:
        touch(self, fields)
        return base.__reduce__(self) if type(self) is kind else _plain_copy(self, kind).__reduce__()

    methods: dict[str, Any] = {
        "__getitem__": item, "get": get, "__reduce__": reduce, "__module__": kind.__module__,
        "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
    }  # fmt: skip
    for method in ("values", "items", "to_tuple", "copy", "__eq__", "__or__", "__ror__"):
        methods[method] = all_touched(method)
    methods["__hash__"] = None
    return type(kind.__name__, (kind,), {**methods, **{name: field(name) for name in fields}})


def _plain_copy(output: Any, kind: Any) -> Any:
    return kind(**{name: OrderedDict.__getitem__(output, name) for name in list(output)})


__all__ = ["LOSS", "NOTHING", "Waits", "waiting"]
