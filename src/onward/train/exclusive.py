"""Methods that one thread runs at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch


class Locked(Protocol):
    """What has a lock that its methods share."""

    _lock: threading.RLock


Owner = TypeVar("Owner", bound=Locked)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """The method, for one thread at a time, and with tensors that outlive an `inference_mode`
    around the call."""

    @functools.wraps(method)
    def locked(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self._lock, torch.inference_mode(False):  # pyright: ignore[reportPrivateUsage]
            return method(self, *args, **kwargs)

    return locked
