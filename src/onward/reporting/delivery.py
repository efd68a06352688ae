"""The thread and the queue between a training loop and one service."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from onward.reporting.record import End, ReportRecord, ReportWriter

log = logging.getLogger("onward.reporting")

CAPACITY = 10_000  # records that wait: about 10 MB, or 2.8 hours at one record per second
# Seconds before the next try, by the number of failures in a row; the last one stays.
PAUSES = (0.0, 0.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TRIES = 3  # of one record at a service that opens: after that the record itself is at fault
LAST_TRIES = 6  # failures in a row, after the end of a run, until the rest is given up


class ReportDelivery:
    """Sends records to one service, in order, in a daemon thread of its own.

    `put` never waits for the service. Where more than `capacity` records wait, the oldest is
    dropped: the newest are those that somebody looks at, and the last ones are the results. What
    the writer raises is told once; a record is tried again, after pauses that grow with the number
    of failures in a row. A record that the writer refuses `TRIES` times though the service answers
    is left out.

    tell: shows the user a line. delivered, lost: numbers of records. error: the newest failure in
    words, "" for none.
    """

    def __init__(
        self,
        name: str,
        writer: ReportWriter,
        tell: Callable[[str], None],
        *,
        capacity: int = CAPACITY,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self.name = name
        self.delivered = 0
        self.lost = 0
        self.error = ""
        self._writer, self._tell = writer, tell
        self._capacity, self._pauses = capacity, pauses
        self._waiting: deque[ReportRecord] = deque()
        self._held: ReportRecord | None = None  # the one that is being tried
        self._changed = threading.Condition()  # re-entrant: a signal's handler may log
        self._end: End | None = None
        self._abandoned = False
        self._told: set[str] = set()
        self._failures = 0  # in a row
        self._tries = 0  # failures of the record that is held
        self._refuses = False  # whether the newest failure was of a record, not of opening
        self._pid = os.getpid()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"report to {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self._abandoned, self.error = True, str(error)
            self._tell_once("failed", f"nothing is reported to {name}: {error}")

    @property
    def waiting(self) -> int:
        """The number of records that are neither delivered nor lost yet."""
        return len(self._waiting) + (self._held is not None)

    def status(self) -> str:
        """What is wrong, in a few words; "" where nothing is."""
        said: list[str] = []
        if self._failures:
            said.append(f"fails ({self.error.partition(':')[0]})")
        if self.lost:
            said.append(f"{self.lost} records lost")
        if said or self.waiting > 1:
            said.append(f"{self.waiting} waiting")
        return f"{self.name} {', '.join(said)}" if said else ""

    def put(self, record: ReportRecord) -> None:
        """Adds a record to those that wait; returns at once."""
        if os.getpid() != self._pid:  # a fork has the queue, but not the thread
            self._tell_once("forked", f"a forked process reports nothing to {self.name}")
            return
        with self._changed:
            if self._end is not None or self._abandoned:
                self.lost += 1
                return
            if len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self.lost += 1
            self._waiting.append(record)
            self._changed.notify_all()

    def finish(self, end: End) -> None:
        """Says that no more records come. Those that wait are sent without pauses, until all are
        delivered or `LAST_TRIES` tries in a row have failed."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._end is None:
                self._end, self._failures = end, 0
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Waits after `finish` until all is sent, at most so many seconds; what is left then is
        lost, and one line says how much that is."""
        if os.getpid() != self._pid:
            return
        if self._thread.ident is not None:
            self._thread.join(max(seconds, 0.0))
        ended = not self._thread.is_alive()
        with self._changed:
            self._abandoned = True
            self.lost += self.waiting
            self._waiting.clear()
            self._held = None
            if not ended and not self.error:
                busy = time.monotonic() - (self._busy_since or time.monotonic())
                self.error = f"no answer for {busy:.0f} s" if busy >= 5 else "it is too slow"
        if self.lost:
            total = self.lost + self.delivered
            why = f" ({self.error})" if self.error else ""
            self._show(f"{self.lost} of {total} records were not delivered to {self.name}{why}")
        elif not ended:
            self._show(f"the run at {self.name} was not ended: {self.error}")

    # ---- in the thread

    def _run(self) -> None:
        is_open = False
        while True:
            record = self._next() if is_open else None
            if self._abandoned or (is_open and record is None):
                break
            self._busy_since = time.monotonic()
            try:
                if record is None:
                    self._writer.open()
                else:
                    self._writer.write(record)
            # a writer that calls sys.exit ends its thread no more than one that raises
            except BaseException as error:
                is_open = False
                if not self._failed(error, record):
                    return
            else:
                is_open = True
                self._succeeded(record)
        if is_open and not self._abandoned:
            self._busy_since = time.monotonic()
            try:
                self._writer.close(self._end or "finished")
            except BaseException as error:
                self._show(f"the run at {self.name} was not ended: {_words(error)}")

    def _next(self) -> ReportRecord | None:
        """The record to try, when there is one; None after the last."""
        with self._changed:
            while self._held is None and not self._waiting:
                if self._end is not None or self._abandoned:
                    return None
                self._changed.wait()
            if self._held is None:
                self._held, self._tries = self._waiting.popleft(), 0
            return self._held

    def _succeeded(self, record: ReportRecord | None) -> None:
        with self._changed:
            self._busy_since = None
            if self._abandoned:  # it counts as lost, and that was said
                return
            if record is not None:
                self._held = None
                self.delivered += 1
            # a service that opens may still refuse the records that it has refused before
            if record is not None or not self._refuses:
                self._failures, self.error, self._refuses = 0, "", False

    def _failed(self, error: BaseException, record: ReportRecord | None) -> bool:
        """Notes a failure, and pauses after several in a row. Returns whether to try again."""
        with self._changed:
            self._busy_since = None
            self._failures += 1
            self.error = _words(error)
            self._refuses = record is not None
            if record is not None:
                self._tries += 1
                if self._tries >= TRIES and not self._abandoned:
                    self._held, self._tries = None, 0
                    self.lost += 1
        log.debug("report to %s failed", self.name, exc_info=error)
        self._tell_once(
            "failed",
            f"reports to {self.name} fail ({self.error}); they wait, {self._capacity} records at "
            "most, and are tried again",
        )
        with self._changed:
            pause = self._pauses[min(self._failures, len(self._pauses)) - 1]
            self._changed.wait_for(lambda: self._end is not None or self._abandoned, pause)
            return not self._abandoned and (self._end is None or self._failures < LAST_TRIES)

    # ---- what is said

    def _tell_once(self, what: str, line: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._show(line)

    def _show(self, line: str) -> None:
        with contextlib.suppress(Exception):  # such as a stderr that nobody reads any more
            self._tell(line)


def _words(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    # what an HTTP library says begins with the request, and ends with the cause
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
