"""RankWatch: where this rank stands among those of its mesh, and who does not come.

A step that goes well writes a few attributes. A thread looks at them now and then, and tells the
other ranks where this one is once it has been away from them for long, such as in a data loader.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from onward.distribute import RanksApartError
from onward.errors import one_line
from onward.execute.rank_records import Certainty, RankRecords, blamed

_SLICE, _AWAY = 5.0, 30.0  # seconds: a part of a wait, and away from the others for long
_GRACE = 5.0  # seconds for the other ranks to tell where they are
_FRAMES = 3  # of a rank that does not come


class EndedWaitError(RuntimeError):
    """Raised where this rank does not wait on, since another has told that it does not go on."""


class RankWatch:
    """The progress of one rank of a mesh, and the reasons why a wait for the others has ended.

    timeout: seconds that a wait may last; the process groups keep it. updates: done by the
    Trainer, for messages. groups: the process groups of the mesh. has_given_up: whether a wait of
    this rank was in vain.
    """

    def __init__(self, records: RankRecords, timeout: float) -> None:
        self.records, self.timeout, self.updates = records, timeout, 0
        self._where = ""  # what this rank does while it waits; empty while it does not
        self._since = time.monotonic()
        self._thread = threading.get_ident()
        self._is_away_told = self.has_given_up = False
        self.groups: list[Any] = []
        self.period = min(_AWAY, timeout / 4)
        self._slice = timedelta(seconds=min(_SLICE, timeout / 2))
        ends = threading.Event()
        watching = threading.Thread(
            target=_watch, args=(weakref.ref(self), ends, self.period), daemon=True,
            name="onward-rank-watch",
        )  # fmt: skip
        watching.start()
        weakref.finalize(self, _end, ends, watching)

    # ---- what this rank does

    @contextmanager
    def waiting(self, where: str) -> Generator[None]:
        """A context in which this rank exchanges something with the others. where: what it does,
        behind "rank 0 ". Raises RanksApartError that names the rank that has not come."""
        if self._is_away_told:
            self._is_away_told = False
            self.records.tell("away", {})
        self._thread, self._since, self._where = threading.get_ident(), time.monotonic(), where
        try:
            yield
        except RanksApartError:
            raise
        except RuntimeError as error:
            raise self.lost(where, error) from error
        finally:
            self._since, self._where = time.monotonic(), ""

    def finish(self, works: Sequence[Any]) -> None:
        """Waits for exchanges on the host, and looks now and then whether another rank has told
        that it does not go on. Raises RuntimeError where an exchange fails."""
        for work in works:
            while True:
                try:
                    work.wait(self._slice)
                    break
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # it has failed, or has arrived at the last moment
                        break
                    if self.records.is_lost():
                        self._keep_groups()
                        raise EndedWaitError from None

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks that this one has left a step that they make together."""
        said = one_line(f"{type(error).__name__}: {error}", 160)
        self.records.tell_lost({"where": self._where, "failed": said})
        self._keep_groups()

    def _keep_groups(self) -> None:
        """Keeps the process groups for ever: an exchange that has started ends only when the time
        is over, and Python would wait for it where it ends and frees its group."""
        while self.groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.groups.pop()))

    def begin_again(self) -> None:
        """Forgets what ranks have told, since a state was loaded into all of them."""
        self.records.generation += 1
        self.has_given_up = False

    # ---- what others do

    def lost(self, where: str, error: RuntimeError) -> RanksApartError:
        """The error about an exchange that torch.distributed has given up."""
        self.has_given_up = True
        waited, rank = time.monotonic() - self._since, self.records.rank
        found = self.records.find({"where": where}, min(_GRACE, self.timeout))
        culprits = blamed(found)
        who = "; ".join(f"rank {f.rank} {f.said}" for f in culprits[:4])
        if len(culprits) > 4:
            who += f"; and {len(culprits) - 4} ranks more"
        fix = "see what that rank printed"
        accusers = [str(f.rank) for f in found if rank in f.accused]
        if not culprits and accusers:
            who = f"rank {' and '.join(accusers)} waited for this one too long and went away"
            fix = "see what kept it, or raise the option ranks_timeout"
        elif not culprits:
            who = "another rank has ended or does not answer"
            if not found:
                who += ", and torch's store does not answer either"
        elif culprits[0].certainty < Certainty.LOST:
            fix = "see what keeps that rank, or raise the option ranks_timeout"
        said = ""
        if not isinstance(error, EndedWaitError):
            said = f" (torch.distributed says: {one_line(str(error), 160)})"
        after = f"{self.updates} update{'' if self.updates == 1 else 's'}"
        return RanksApartError(
            f"{who}, while rank {rank} {where} after {after}, for {waited:.0f} s{said}; "
            f"fix: {fix}, and start the program again from its last checkpoint"
        )

    def look(self) -> None:
        """Tells the others where this rank is, if it has been away from them for long."""
        seconds = time.monotonic() - self._since
        if self._where or seconds < self.period:
            return
        at = _place(self._thread)
        if at and not self._where:
            self._is_away_told = True
            self.records.tell("away", {"seconds": seconds, "at": at})


def _place(thread: int) -> str:
    """Where a thread of Python is, from the innermost frame; empty where it has ended."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    places: list[str] = []
    while frame is not None and len(places) < _FRAMES:
        code = frame.f_code
        places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return f"at {', called at '.join(places)}" if places else ""


def _watch(watch: weakref.ref[RankWatch], ends: threading.Event, period: float) -> None:
    """Looks at a rank until it is gone."""
    while not ends.wait(period):
        found = watch()
        if found is None:
            return
        found.look()
        del found


def _end(ends: threading.Event, watching: threading.Thread) -> None:
    """Ends the thread, before Python ends."""
    ends.set()
    if watching is not threading.current_thread():
        watching.join(1.0)


__all__ = ["RankWatch"]
