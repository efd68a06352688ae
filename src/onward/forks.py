"""Forks: a child process that `os.fork` has made goes on with what its parent prepared.

Three things of a parent do not arrive in its child, which has one thread, the one that forked:

- OpenMP's other threads. GCC's runtime waits for them at the next parallel region, for ever, also
  in PyTorch's own operators. So the forking thread ends them before the fork
  (`omp_pause_resource_all`, OpenMP 5.0), and both processes start new ones when they need them.
- Whoever held a lock. Such a lock is open in the child.
- What that thread was doing. An update in the middle is refused as one that an exception
  interrupted; of a capture, which has patched what all threads share, `Lock.is_lost` tells.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import weakref
from typing import Any

from onward.errors import OnwardError

_SOFT = 1  # omp_pause_soft: settings stay
_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock(_thread.RLock):  # pyright: ignore[reportGeneralTypeIssues] # CPython's may be a base
    """A re-entrant lock that is open in the child of a fork, whichever thread held it.

    is_lost: whether another thread held it at the fork, and has left something half done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False
        _locks.add(self)

    def require_whole(self, held_for: str) -> None:
        """Raises OnwardError where the lock is lost. held_for: what a thread did that held it."""
        if self.is_lost:
            raise OnwardError(
                f"this process was forked while another thread was {held_for}, which has ended "
                "half done here; fix: fork at another time, or start the process with the method "
                "'spawn' or 'forkserver'"
            )


def _end_threads() -> None:
    """Ends the threads that OpenMP keeps for this one; the next parallel region starts others."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_SOFT)


def _open_locks() -> None:
    for lock in list(_locks):
        if lock.acquire(blocking=False):
            lock.release()
        else:
            reopen: Any = getattr(lock, "_at_fork_reinit")  # noqa: B009 # as threading does
            reopen()
            lock.is_lost = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_end_threads, after_in_child=_open_locks)

__all__ = ["Lock"]
