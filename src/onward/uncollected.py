"""Code during which Python's cyclic garbage collector does not run."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

from onward.forks import Lock

_lock = Lock()
_held: list[bool] = []  # for each context that threads are in: whether it ended the collector


@contextmanager
def uncollected() -> Generator[None]:
    """A context without Python's cyclic garbage collector, on any thread, until the last thread
    has left it."""
    with _lock:
        _held.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            # the one that ended the collector is the last that starts it
            ended = _held.pop()
            if _held:
                _held[0] = _held[0] or ended
            elif ended:
                gc.enable()
