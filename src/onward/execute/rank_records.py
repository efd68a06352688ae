"""RankRecords: what ranks tell one another through torch's store once an exchange has failed.

A rank tells something only where it has been away for long, has failed, or has waited in vain.
Nothing here is called in a step that goes well.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from threading import Thread
from typing import Any

_POLL, _SETTLED = 0.1, 0.5  # seconds between two looks, and before a look may be the last
_ABORTED = 5.0  # seconds for a store that may not answer


class Certainty(IntEnum):
    """How sure it is that a rank is the one that the others wait for."""

    WAITS = 0  # it has given up waiting as well
    LATE = 1  # it has not come
    LOST = 2  # it has ended, is stopped, or has failed


@dataclass(frozen=True)
class RankFinding:
    """What is known of a rank that others wait for. said: behind "rank 1 ". accused: the ranks that
    it waits for itself. is_told: it has told itself where it is."""

    rank: int
    certainty: Certainty
    said: str
    accused: tuple[int, ...] = ()
    is_told: bool = True


class RankRecords:
    """The records of the ranks of a mesh, in the store of torch.distributed.

    store: of the process group (`torch.distributed.Store`); None where there is none, and then
    less is known of other ranks. number: of the mesh among those of this process. processes: of the
    ranks, each as `own_process` returns it; none until they are known.
    """

    def __init__(self, store: Any, number: int, rank: int, ranks: int) -> None:
        self._store, self._number, self.rank, self.ranks = store, number, rank, ranks
        self.processes: list[Mapping[str, Any]] = []
        self.generation = 0  # of the records; a state that was loaded begins another one

    def tell(self, what: str, record: Mapping[str, Any]) -> None:
        """Writes a record of this rank. what: "away" or "gave_up"."""
        self._ask(lambda store: store.set(self._key(self.rank, what), json.dumps(dict(record))))

    def tell_lost(self, record: Mapping[str, Any]) -> None:
        """Tells that this rank does not go on with the others."""
        self.tell("gave_up", record)
        self._ask(lambda store: store.set(self._key(0, "lost"), "1"))

    def is_lost(self) -> bool:
        """Says whether any rank has told that it does not go on."""

        def look() -> bool:
            return bool(self._ask(lambda store: store.check([self._key(0, "lost")])))

        return bool(_bounded(look, _ABORTED))

    def find(self, own: Mapping[str, Any], seconds: float) -> list[RankFinding]:
        """Tells that this rank gives up waiting, and returns what is known of each other rank once
        all have told something, one is known to be lost, or the seconds are over. own: the record
        of this rank. Where the store does not answer, only what the processes show."""

        def look() -> list[RankFinding]:
            self.tell_lost(own)
            start = time.monotonic()
            while True:
                found = [self._look(rank) for rank in range(self.ranks) if rank != self.rank]
                passed = time.monotonic() - start
                is_lost = any(f.certainty == Certainty.LOST for f in found)
                is_clear = is_lost or all(f.is_told for f in found)
                if passed >= seconds or (is_clear and passed >= _SETTLED):
                    accused = [f.rank for f in blamed(found)]
                    self.tell_lost({**own, "accused": accused})
                    return found
                time.sleep(_POLL)

        return _bounded(look, seconds + _ABORTED) or self._look_alone()

    def _look_alone(self) -> list[RankFinding]:
        """What the processes of this machine show, where the store does not answer."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        found = [self._look_at_process(rank) for rank in others]
        return [f for f in found if f.certainty == Certainty.LOST]

    def _look(self, rank: int) -> RankFinding:
        gave_up = self._read(rank, "gave_up")
        if gave_up is not None and gave_up.get("failed"):
            said = f"has failed in a step that the ranks make together ({gave_up['failed']})"
            return RankFinding(rank, Certainty.LOST, said)
        if gave_up is not None:
            accused = tuple(int(r) for r in gave_up.get("accused", ()))
            return RankFinding(rank, Certainty.WAITS, str(gave_up["where"]), accused)
        found = self._look_at_process(rank)
        if found.certainty == Certainty.LOST:
            return found
        where, away = self._process(rank), self._read(rank, "away")
        if away:
            said = f"does not come{where}: for {away['seconds']:.0f} s it has been {away['at']}"
            return RankFinding(rank, Certainty.LATE, said)
        return found

    def _look_at_process(self, rank: int) -> RankFinding:
        state = _state(self.processes[rank]) if self.processes else ""
        if state:
            return RankFinding(rank, Certainty.LOST, f"{state}{self._process(rank)}")
        said = f"does not come, and nothing is heard of it{self._process(rank)}"
        return RankFinding(rank, Certainty.LATE, said, is_told=False)

    def _process(self, rank: int) -> str:
        """The process of a rank, for a message."""
        if not self.processes:
            return ""
        process = self.processes[rank]
        return f" (process {process['pid']} on {process['host'][0]})"

    def _read(self, rank: int, what: str) -> dict[str, Any] | None:

        def read(store: Any) -> Any:
            key = self._key(rank, what)
            return store.get(key) if store.check([key]) else None

        found = self._ask(read)
        return None if found is None else json.loads(found)

    def _ask(self, act: Callable[[Any], Any]) -> Any:
        """What a function of the store returns; None once the process that holds it has ended, and
        before the processes of the ranks are known."""
        if self._store is None or not self.processes:
            return None
        try:
            return act(self._store)
        except RuntimeError:
            self._store = None  # torch prints a trace for each further call
            return None

    def _key(self, rank: int, what: str) -> str:
        first = self.processes[0]  # torchrun keeps the store for the ranks that it starts again
        run = f"{first['host'][0]}/{first['pid']}/{first['started']}"
        return f"onward/{run}/{self._number}/{self.generation}/{rank}/{what}"


def blamed(found: list[RankFinding]) -> list[RankFinding]:
    """The ranks that the others wait for: those that are lost, else those that do not come."""
    worst = max((f.certainty for f in found), default=Certainty.WAITS)
    return [f for f in found if f.certainty == worst > Certainty.WAITS]


def _bounded(act: Callable[[], Any], seconds: float) -> Any:
    """What a function returns, or None after these seconds: the process that holds the store may be
    stopped, and a read of the store then never ends."""
    result: list[Any] = []

    def run() -> None:
        result.append(act())

    thread = Thread(target=run, name="onward-rank-records", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


# ---- processes of this machine


def own_process() -> dict[str, Any]:
    """What tells this process from all others, as JSON may hold it."""
    pid = os.getpid()
    return {"pid": pid, "host": _host(), "started": _stat(pid)[1]}


def _host() -> list[str]:
    """The name of the machine, and what tells its process numbers from those of other machines and
    containers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return [platform.node(), boot, str(Path("/proc/self/ns/pid").readlink())]
    return [platform.node()]


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process of Linux and the time of its start; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def _state(process: Mapping[str, Any]) -> str:
    """What is wrong with a process, if it is one of this machine; empty where it runs, and where
    nothing can be said."""
    if process["host"] != _host() or len(process["host"]) == 1:
        return ""
    letter, started = _stat(int(process["pid"]))
    if started != process["started"] or letter in "ZX":
        return "has ended"
    return "is stopped" if letter in "Tt" else ""


__all__ = ["Certainty", "RankFinding", "RankRecords", "blamed", "own_process"]
