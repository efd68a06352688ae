"""Signals that come while a module is imported end the process there and then.

An exception that a handler raises within an import may become another one, or end the process by an
abort: a native module that pybind11 has made calls std::terminate. Nothing of a run is under way
meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


def importing(frame: FrameType | None) -> bool:
    """Tells whether a module is being imported by a call that has led to this frame."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def end_process(line: str, status: int) -> None:
    """Writes a line to stderr, and ends the process without a word to what it has imported."""
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: the signal has interrupted a print
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="replace"))
    os._exit(status)


@contextmanager
def interrupts_end_imports(line: str) -> Generator[None]:
    """A context in which Ctrl-C within an import writes a line and ends the process with status
    130. It does nothing outside of the main thread, and beside another handler than Python's."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if importing(frame):
            end_process(line, 128 + number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, before)


__all__ = ["end_process", "importing", "interrupts_end_imports"]
