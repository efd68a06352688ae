"""Writes checkpoints in a thread, while training goes on.

At most one checkpoint is being written and one waits. One that comes while another waits takes its
place: on a disk slower than the interval of saves the newest is written, and memory holds two
copies at most.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from onward.errors import CheckpointError

log = logging.getLogger("onward")

Write = Callable[[], object]


class BackgroundWriter:
    """A queue of one. A write that fails is said in one warning, and raised by `finish`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: tuple[Path, Write] | None = None
        self._thread: threading.Thread | None = None
        self._failed: tuple[Path, OSError | CheckpointError] | None = None

    def add(self, path: Path, write: Write) -> None:
        """Has `write` called in a thread. The interpreter waits for it when it ends."""
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

    def finish(self) -> None:
        """Waits until everything is written. Raises CheckpointError where the last write failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)
            failed, self._failed = self._failed, None
        if failed is not None:
            raise unwritten(*failed) from failed[1]

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
                failed = None
            except (OSError, CheckpointError) as error:
                failed = path, error
                log.warning("%s; training goes on", unwritten(path, error))
            del write  # the copy that it holds
            self._failed = failed


def unwritten(path: Path, error: OSError | CheckpointError) -> CheckpointError:
    """The error of a checkpoint that could not be written."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"checkpoint {path} cannot be written: {error.strerror or error}")


__all__ = ["BackgroundWriter", "unwritten"]
