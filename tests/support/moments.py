"""Exceptions at chosen moments of a call: at any line, call or return of any Python code in it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stop(BaseException):
    """Not an Exception, as KeyboardInterrupt."""


def stop() -> None:
    """Raises where it is called, as an exception that another thread has sent."""
    raise Stop


def interrupt() -> None:
    """Sends SIGINT, which Python's handler turns into KeyboardInterrupt."""
    signal.raise_signal(signal.SIGINT)


STRIKES: dict[str, Callable[[], None]] = {"SIGINT": interrupt, "sent": stop}


def events(act: Callable[[], object]) -> int:
    """The number of moments of a call."""
    count = [0]

    def trace(frame: Any, event: str, value: Any) -> Any:
        count[0] += 1
        return trace

    with _traced(trace):
        act()
    return count[0]


def struck(act: Callable[[], object], moment: int, strike: Callable[[], None]) -> bool:
    """Runs a call and strikes at that moment. Returns whether the exception came out of it; a
    finalizer swallows what is raised within it."""
    count = [0]

    def trace(frame: Any, event: str, value: Any) -> Any:
        count[0] += 1
        if count[0] == moment:
            strike()
        return trace

    try:
        with _traced(trace):
            act()
    except (KeyboardInterrupt, Stop):
        return True
    return False


def chosen(count: int, wanted: int) -> list[int]:
    """So many moments of `count`, evenly over all of them, from 1."""
    wanted = min(wanted, count)
    return sorted({1 + i * count // wanted for i in range(wanted)})


@contextmanager
def _traced(trace: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def pythons_handler() -> Iterator[None]:
    """A context with Python's handler of SIGINT, which is ignored in what a shell starts in the
    background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
