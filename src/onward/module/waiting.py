"""Outputs that wait: fields of a Hugging Face ModelOutput that are computed when they are read.

Of fields that no caller of late has read, the tensor is not computed with the forward. The output's
class is then a subclass of the model's own, made here, until every field is there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from onward.capture.trace.output_tree import Computed, Container, Part

LOSS = "loss"
_WAITS = "_onward_waits"
NOTHING = torch.empty(0)  # stands where a field is that is not computed yet


def waiting(root: Part | None) -> dict[str, str]:
    """The fields of the outputs that can wait, and their results: those of a ModelOutput that are
    one tensor each, but for the loss."""
    if not isinstance(root, Container) or not _is_model_output(root.kind):
        return {}
    return {
        key: part.name
        for key, part in zip(root.keys, root.parts, strict=True)
        if isinstance(part, Computed) and key != LOSS
    }


class Waits:
    """What an output knows of its fields. fields: the result of each that may wait. absent: those
    that are not computed. read: results that were read are entered there. compute: gives all that
    are absent, by field."""

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
        """The output, which tells from now on what of it is read."""
        vars(output)[_WAITS] = self
        output.__class__ = _class(type(output), tuple(self.fields))
        return output

    def touch(self, output: Any, field: str) -> None:
        """The field is about to be read."""
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
        """The field waits no longer; where none does, the output is the model's own again."""
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
    """A subclass that asks `Waits` before a field is read, by whatever way."""

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
