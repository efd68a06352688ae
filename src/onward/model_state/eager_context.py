"""`eager`: a context in which accelerated modules run in eager PyTorch instead of their graphs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


@contextmanager
def eager() -> Iterator[None]:
    """A context in which accelerated models run in eager PyTorch, in this thread.

    Captures, rehearsals and verifications run a forward within it to see what its code does. A
    graph would answer for an earlier capture of that code: with other dropout masks, with its own
    rounding, and without the attributes that the forward sets.
    """
    before = is_eager()
    _here.on = True
    try:
        yield
    finally:
        _here.on = before


def is_eager() -> bool:
    """Returns whether the calling thread is within `eager`."""
    return getattr(_here, "on", False)


__all__ = ["eager", "is_eager"]
