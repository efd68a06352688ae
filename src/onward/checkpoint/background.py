"""Writes checkpoints in a thread, while training goes on.

At most one checkpoint is being written and one waits. One that comes while another waits takes its
place: on a disk slower than the interval of saves the newest is written, and memory holds two
copies at most.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from onward.errors import CheckpointError

log = logging.getLogger("onward")

Write = Callable[[], object]


class BackgroundWriter:
    """A queue of one. A write that fails is said in one warning, and raised by `finish`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: tuple[Path, Write] | None = None
        self._thread: threading.Thread | None = None
        self._failed: tuple[Path, BaseException] | None = None

    def add(self, path: Path, write: Write) -> None:
        """Has `write` called in a thread. The interpreter waits for it when it ends."""
        self._begin_in_a_fork()
        with self._changed:
            if self._waiting is not None:
                log.warning(
                    "checkpoint %s is left out: the disk is slower than the interval of saves",
                    self._waiting[0],
                )
            self._waiting = path, write
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="onward checkpoint writer")
                self._thread.start()

    def wait(self) -> None:
        """Waits until everything is written, or has failed."""
        self._begin_in_a_fork()
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def finish(self) -> None:
        """Waits until everything is written. Raises what the last write raised, an OSError as a
        CheckpointError."""
        self.wait()
        failed, self._failed = self._failed, None
        if failed is None:
            return
        path, error = failed
        if isinstance(error, OSError):
            raise unwritten(path, error) from error
        raise error

    def _begin_in_a_fork(self) -> None:
        """Forgets the parent's checkpoints in a forked process: the parent's thread writes them."""
        if os.getpid() != self._pid:
            BackgroundWriter.__init__(self)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                (path, write), self._waiting = self._waiting, None
            try:
                write()
                self._failed = None
            except BaseException as error:
                self._failed = path, error
                said = unwritten(path, error) if isinstance(error, OSError) else repr(error)
                log.warning("%s; training goes on", said)
            del write  # the copy that it holds


def unwritten(path: Path, error: OSError) -> CheckpointError:
    """The error of a checkpoint that the disk did not take."""
    return CheckpointError(f"checkpoint {path} cannot be written: {error.strerror or error}")


__all__ = ["BackgroundWriter", "unwritten"]
