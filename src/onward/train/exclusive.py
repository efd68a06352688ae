"""Methods that one thread runs at a time, of all Trainers that train the same parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from onward.forks import Lock


class Locked(Protocol):
    """An object with a lock that its methods share."""

    _lock: Lock


Owner = TypeVar("Owner", bound=Locked)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


# the lock of whoever trains a parameter
_locks: MutableMapping[torch.Tensor, Lock] = WeakIdKeyDictionary()


def lock_of(model: torch.nn.Module) -> Lock:
    """The lock of a Trainer of this model: that of an earlier Trainer of any of its parameters, or
    a new one. So two Trainers in two threads never write to the same weights at once."""
    parameters = list(model.parameters())
    found = next((lock for p in parameters if (lock := _locks.get(p)) is not None), None) or Lock()
    for p in parameters:
        _locks.setdefault(p, found)
    return found


def exclusive(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Makes a method hold the object's lock, and leave `inference_mode` so that its tensors can be
    trained later. It raises OnwardError in a process that was forked while another thread held the
    lock."""

    @functools.wraps(method)
    def locked(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        lock = self._lock  # pyright: ignore[reportPrivateUsage]
        lock.require_whole(f"using a {type(self).__name__}")
        with lock, torch.inference_mode(False):
            return method(self, *args, **kwargs)

    return locked
