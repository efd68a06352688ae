"""Signals that end a run in good order, and one that asks how far it is.

SIGINT (Ctrl-C), SIGTERM and SIGHUP end a run: at once, or within `deferred` when its loop asks
`stopping`, which is after the running step. A second SIGINT stops the process whatever it does.
SIGUSR1 prints one line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from onward.import_signals import end_process, importing

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")
STATUS = "SIGUSR1"


class Stopped(KeyboardInterrupt):
    """Raised where a signal ends the run. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status by which a shell knows the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class StopSignals:
    """Handles the signals of a run in a `with` block; its end restores the handlers before it.

    A signal that the process was started to ignore, as shells start jobs in the background, stays
    ignored. Outside of the main thread, where Python has no handlers, it does nothing.

    stopping: the number of the signal that asked the run to end; None for none. status: returns the
    line that SIGUSR1 prints. tells: whether it prints.
    """

    def __init__(self, tells: bool = True) -> None:
        self._tells = tells
        self.stopping: int | None = None
        self.status: Callable[[], str] = lambda: "preparing"
        self._deferring = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for name in STOPPING:
                self._handle(name, self._stop)
            self._handle(STATUS, self._show)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, name: str, handler: Callable[[int, FrameType | None], None]) -> None:
        number = getattr(signal, name, None)  # Windows has two of them
        if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
            self._before[number] = signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Generator[None]:
        """Within the block a signal sets `stopping` and raises nothing; at its end Stopped is
        raised, where the block has raised nothing itself."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self.stopping is not None:
            raise Stopped(self.stopping)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        first = self.stopping is None
        if first:
            self.stopping = number
        if not self._deferring:
            stopped = Stopped(self.stopping or number)
            if importing(frame):
                end_process(f"onward finetune: {stopped}\n" if self._tells else "", stopped.status)
            raise stopped
        if number == signal.SIGINT:
            # by the kernel, so that not even a long native call is waited for
            signal.signal(number, signal.SIG_DFL)
        # a second SIGTERM changes nothing: timeout and job schedulers may send it twice
        if first:
            again = "; a second one stops at once" if number == signal.SIGINT else ""
            self._tell(
                f"{signal.Signals(number).name}: the running update is finished first{again}"
            )

    def _show(self, number: int, frame: FrameType | None) -> None:
        self._tell(self.status())

    def _tell(self, line: str) -> None:
        """Writes a line to stderr from a signal handler, which may have interrupted a print."""
        if self._tells:
            start = "\n" if sys.stderr.isatty() else ""  # behind the bar
            os.write(2, f"{start}onward finetune: {line}\n".encode(errors="replace"))


__all__ = ["StopSignals", "Stopped"]
