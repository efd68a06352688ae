"""Sweep: a fast check, by object identity, of whether all that a walk saw is unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import numpy as np
import torch

from onward.model_state.patches import ABSENT
from onward.model_state.walk import Walk

_values = methodcaller("values")
_get = dict.get
_contents = attrgetter("cell_contents")
_parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")
# the form has no device: a tensor that is moved to another one has another address
_form = attrgetter("__class__", "requires_grad", "dtype", "shape")
_tensor_hooks = attrgetter("_backward_hooks")
_late_hooks = attrgetter("_post_accumulate_grad_hooks")


class Sweep:
    """Compares what a walk saw with what is there now, object by object and by identity, in passes
    that call none of the user's code. (`==` would call it, and gives no bool for tensors.)"""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._scopes = list(walk.names.values())
        self._names = [name for _, name in walk.names]
        self._owners = [owner for owner, _ in walk.slots]
        self._slots = [name for _, name in walk.slots]
        self._holders = [held for held, _ in walk.fields]
        self._fields = [name for _, name in walk.fields]
        self._views = list(map(_values, walk.mappings))  # each shows what its mapping holds now
        self._sized = [*walk.mappings, *walk.sequences, *walk.long]
        self._sizes = list(map(len, self._sized))
        self._identities = list(chain.from_iterable(self._held()))  # kept alive: no id is reused
        self._addresses = _addresses(self._identities, len(self._identities))
        self._equals = [list(found) for found in self._told()]
        # tensors without hooks are the usual case, for which there is a faster comparison
        self._hooks = [list(map(get, walk.tensors)) for get in (_tensor_hooks, _late_hooks)]
        self._hooked = any(map(any, self._hooks))
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The walk's tensors."""
        return self._walk.tensors

    def _held(self) -> Iterator[Iterable[Any]]:
        """Yields the objects to compare by identity. All keys are among them, since a mapping may
        be filled again with the same values under other keys."""
        walk = self._walk
        yield chain.from_iterable(self._views)
        yield chain.from_iterable(walk.mappings)
        yield chain.from_iterable(walk.sequences)
        yield map(type, walk.objects)
        yield chain.from_iterable(map(_parts, walk.functions))
        yield map(_contents, walk.cells)
        yield map(_get, self._scopes, self._names)
        yield map(_get, self._holders, self._fields, repeat(ABSENT))
        yield map(getattr, self._owners, self._slots, repeat(None))

    def _told(self) -> Iterator[Iterable[Any]]:
        """Yields the plain values to compare with `==`."""
        walk = self._walk
        yield map(_form, walk.tensors)
        yield map(torch.Tensor.stride, walk.tensors)
        yield map(torch.Tensor.data_ptr, walk.tensors)
        yield (x.tobytes() for x in walk.arrays)

    def same(self) -> bool:
        """Returns whether everything is unchanged since the sweep was made."""
        walk = self._walk
        try:
            return (
                self._sizes == list(map(len, self._sized))
                and not any(walk.empty)
                and self._same_hooks()
                and torch.get_default_dtype() == self._dtype
                and torch.get_default_device() == self._device
                and _addresses(chain.from_iterable(self._held()), len(self._identities))
                == self._addresses
                and all(list(a) == b for a, b in zip(self._told(), self._equals, strict=True))
            )
        except (RuntimeError, ValueError):  # a closure cell now empty, a tensor without memory
            return False

    def _same_hooks(self) -> bool:
        """Returns whether the tensors have the same dicts of hooks as before. Their contents are
        compared with those of all other mappings."""
        tensors, (hooks, late) = self._walk.tensors, self._hooks
        if not self._hooked:
            return not any(map(_tensor_hooks, tensors)) and not any(map(_late_hooks, tensors))
        return all(map(is_, map(_tensor_hooks, tensors), hooks)) and all(
            map(is_, map(_late_hooks, tensors), late)
        )


def _addresses(objects: Iterable[Any], count: int) -> bytes:
    """Returns the memory addresses of so many objects, one after the other: to compare those takes
    half the time of `is` for each pair. Raises ValueError if there are fewer."""
    return np.fromiter(objects, object, count).tobytes()
