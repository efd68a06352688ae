"""A decorator for methods that one thread runs at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class Locked(Protocol):
    """An object with a lock that its methods share."""

    _lock: threading.RLock


Owner = TypeVar("Owner", bound=Locked)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Makes a method hold the object's lock, and leave `inference_mode` so that its tensors can be
    trained later."""

    @functools.wraps(method)
    def locked(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self._lock, torch.inference_mode(False):  # pyright: ignore[reportPrivateUsage]
            return method(self, *args, **kwargs)

    return locked
