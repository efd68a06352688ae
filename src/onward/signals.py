"""Deferred signals: a handler's exception is raised after a block of code instead of within it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_WAITING = [
    number
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM")
    if (number := getattr(signal, name, None)) is not None
]


@contextmanager
def signals_wait(insistent: bool = False) -> Generator[None]:
    """A context in which Python signal handlers do not run; pending ones run at its end.

    insistent: a signal that arrives a second time is handled at once, so that code which never ends
    can be interrupted. Only the main thread runs handlers, so this does nothing on other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers: dict[int, Any] = {}
    waiting = True

    def later(number: int, frame: Any) -> None:
        if waiting and not (insistent and number in arrived):
            arrived.append(number)
        else:  # insisted, or between the block's end and the return of this handler to its place
            handlers[number](number, frame)

    try:
        try:
            for number in _WAITING:
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[number] = handler
                    signal.signal(number, later)
            yield
        finally:
            waiting = False
            _restore(handlers)
    finally:  # where an exception that another thread has sent kept the first from its work
        waiting = False
        _restore(handlers)
        _raise(list(dict.fromkeys(arrived)))


def _restore(handlers: dict[int, Any]) -> None:
    """Restores all handlers, also where one of those restored already raises meanwhile."""
    for number in list(handlers):
        try:
            signal.signal(number, handlers[number])
        except BaseException:
            _restore(handlers)
            raise
    handlers.clear()


def _raise(numbers: list[int]) -> None:
    """Raises all signals, also where the handler of one raises."""
    while numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        except BaseException:
            _raise(numbers)
            raise
