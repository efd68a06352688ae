"""The context in which modules whose calls run as graphs run their own code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


@contextmanager
def eager() -> Iterator[None]:
    """Within it, in this thread, accelerated models run in eager PyTorch.

    Captures, rehearsals and verifications ask a forward within it what it does. A graph would
    answer with what another capture has made of it: with masks of dropout of its own, rounded as
    its plan for this batch does, and without the values that the forward sets.
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
