"""Shows compilation stages while they run, from the messages of the logger `onward`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import TracebackType


class Stages(logging.Handler):
    """Calls `begin(stage)` as each stage begins, and sums the seconds of finished stages."""

    def __init__(self, begin: Callable[[str], None]) -> None:
        super().__init__()
        self.begin = begin
        self.seconds: dict[str, float] = {}
        self._log = logging.getLogger("onward")

    def __enter__(self) -> Stages:
        self._level = self._log.level
        self._log.addHandler(self)
        self._log.setLevel(logging.DEBUG)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        stage, seconds = getattr(record, "stage", None), getattr(record, "seconds", None)
        if stage is None:
            return
        if seconds is None:
            self.begin(stage)
        else:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def taken(self) -> str:
        """Describes the stages compiled since the last call; "" for none."""
        if not self.seconds:
            return ""
        parts = ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items() if s >= 0.05)
        total = sum(self.seconds.values())
        self.seconds.clear()
        return f"compiled in {total:.1f} s" + (f" ({parts})" if parts else "")


class StageLine(Stages):
    """Shows stages as one line on stderr: updated as they go on a terminal, as a summary elsewhere.

    title: the beginning of the line.
    """

    def __init__(self, title: str) -> None:
        super().__init__(self._show)
        self.title = title

    def _show(self, stage: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{self.title}: compiling: {stage}", end="", file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        start = "\r\033[K" if sys.stderr.isatty() else ""
        taken = self.taken()
        if error is None and taken:
            print(f"{start}{self.title}: {taken}", file=sys.stderr, flush=True)
        elif start and taken:
            print(start, end="", file=sys.stderr, flush=True)
