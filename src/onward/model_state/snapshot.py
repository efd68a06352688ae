"""Snapshot: a copy of the values that a model and its loss function hold, to restore them from."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from onward.model_state.facts import Same
from onward.model_state.patches import ABSENT
from onward.model_state.walk import Walk


class Snapshot(Walk):
    """A walk that also copies containers, attributes and arrays, to restore them.

    A tensor is recorded by identity, and its numbers are not restored: within an export they and
    its sizes may not be read. No step waits for this walk, so it goes deeper than the guards' walk.
    """

    elements, bytes, depth = 20_000, 1 << 22, 8

    def __init__(self, model: torch.nn.Module, loss_fn: Any) -> None:
        self._set: list[tuple[dict[str, Any], dict[str, Any]]] = []
        super().__init__(model, loss_fn)
        self._copies = [
            (held, kind.copy(held))  # type: ignore[attr-defined]
            for held in (*self.mappings, *self.sequences, *self.empty, *self.long)
            for kind in (dict, list, set, deque)
            if isinstance(held, kind)
        ]
        attributes = [(x, name) for x, name in self.slots if hasattr(x, name)]
        self._slotted = [(x, name, getattr(x, name)) for x, name in attributes]
        self._classes = [(cls, dict(vars(cls))) for cls in self.classes]
        self._globals = [(scope, name, scope[name]) for (_, name), scope in self.names.items()]
        self._contents = [(cell, cell.cell_contents) for cell in self.cells]
        self._arrays = [(x, x.copy()) for x in self.arrays]
        self._misses = [(cache, cache.cache_info().misses) for cache in self.caches]

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        self.facts[path] = (Same(x), x.requires_grad)
        if not isinstance(x, FakeTensor):
            self._attributes(x, path, self.depth)
            return
        held = vars(x)
        own = {name: held[name] for name in held.keys() - traces_names()}
        self._set.append((held, own))
        for name, value in own.items():
            self.visit(value, f"{path}.{name}")

    def _module(self, m: torch.nn.Module, path: str) -> None:
        super()._module(m, path)
        self.facts[f"{path}.training"] = (bool, m.training)

    def restore(self) -> None:
        """Sets everything that was copied back to its values at the snapshot."""
        for held, before in self._copies:
            _refill(held, before)
        for held, before in self._set:
            for name in held.keys() - traces_names() - before.keys():
                del held[name]
            held.update(before)
        for x, name, value in self._slotted:
            if getattr(x, name, ABSENT) is not value:
                object.__setattr__(x, name, value)
        for cls, before in self._classes:
            for name in [n for n in vars(cls) if n not in before and not n.startswith("__")]:
                delattr(cls, name)
            for name, value in before.items():
                if vars(cls).get(name, ABSENT) is not value and not name.startswith("__"):
                    setattr(cls, name, value)
        for scope, name, value in self._globals:
            if scope.get(name, ABSENT) is not value:
                scope[name] = value
        for cell, value in self._contents:
            cell.cell_contents = value
        for x, before in self._arrays:
            with suppress(ValueError):  # read-only, and so unchanged
                x[...] = before
        for kept, misses in self._misses:
            if kept.cache_info().misses != misses:
                kept.cache_clear()


@cache
def traces_names() -> frozenset[str]:
    """Returns the attributes that an export itself sets on a tensor. The first call has to come
    from outside an export."""
    return frozenset(vars(FakeTensorMode().from_tensor(torch.nn.Parameter(torch.empty(1)))))


def _refill(held: Any, before: Any) -> None:
    if isinstance(held, dict):  # key by key: other threads may be reading
        for key in [k for k in held if k not in before]:
            del held[key]
        for key, value in before.items():
            if dict.get(held, key, ABSENT) is not value:  # a subclass may have a `get` of its own
                held[key] = value
    elif isinstance(held, set):
        if held != before:
            held.clear()
            held.update(before)
    elif len(held) != len(before) or any(a is not b for a, b in zip(held, before, strict=True)):
        held.clear()
        held.extend(before)


__all__ = ["Snapshot", "traces_names"]
