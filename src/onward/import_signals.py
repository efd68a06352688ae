"""Signals that come while a module is imported are handled behind the import.

An exception within an import leaves the module half made, and within a native one it may become
another exception, or end the process: pybind11 calls std::terminate.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, "FrameType | None"], object]
PAUSE = 0.05  # seconds between two looks


def importing(frame: FrameType | None) -> bool:
    """Tells whether a module is being imported by a call that has led to this frame."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def behind_imports(handler: Handler) -> Handler:
    """Returns a signal handler that calls `handler`, as soon as no module is being imported. A
    second signal is handled at once."""
    waiting: set[int] = set()
    again: set[int] = set()  # those of them that this process sends itself

    def handle(number: int, frame: FrameType | None) -> None:
        ours = number in again
        again.discard(number)
        if ours and number not in waiting:  # a second one was handled meanwhile
            return
        if importing(frame) and (ours or number not in waiting):
            waiting.add(number)
            # by _thread: threading.Thread takes locks, which the interrupted code may hold
            _thread.start_new_thread(send_again, (number,))
            return
        waiting.discard(number)
        handler(number, frame)

    def send_again(number: int) -> None:
        time.sleep(PAUSE)
        if number in waiting:
            again.add(number)
            os.kill(os.getpid(), number)

    return handle


@contextmanager
def interrupts_behind_imports() -> Generator[None]:
    """A context in which Ctrl-C waits for imports, in a main thread whose handler is Python's."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is not signal.default_int_handler:
        yield
        return
    mine = behind_imports(signal.default_int_handler)
    signal.signal(signal.SIGINT, mine)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is mine:
            signal.signal(signal.SIGINT, before)


__all__ = ["behind_imports", "importing", "interrupts_behind_imports"]
