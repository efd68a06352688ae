"""Liveness: from which launch to which each storage lives, and whose memory it reuses.

One simulation serves the plan, which places the storages, and the memory estimate, which asks
hundreds of times what recomputing a launch would change. A launch that runs again makes storages of
its own, the twins, which only the backward half reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onward.plan.storages import Storages

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Liveness:
    """The positions of launches in a sequence, and the lifetimes of storages.

    The twin of a storage has the storage's number plus the number of storages. at, again: positions
    of launches, and of second runs by launch. end: length of the sequence. first, last: positions
    between which each storage is needed, both included; `end` for one that is kept. late: the first
    position where the backward half reads it, else `end`. over: storage -> the storage whose memory
    it reuses, from that one's last read on. nbytes: bytes that launches have made and that are
    alive at each position, temporaries included.
    """

    at: Numbers
    again: dict[int, int]
    end: int
    first: Numbers
    last: Numbers
    late: Numbers
    over: dict[int, int]
    nbytes: Numbers


class Simulator:
    """Simulates the lifetimes of storages for one order of launches, with any forward launches run
    again."""

    def __init__(self, storages: Storages) -> None:
        accesses = storages.accesses
        self._n, self._size = len(accesses), len(storages.nbytes)
        self._backward = np.array([a.is_backward for a in accesses], dtype=bool)
        self._transient = np.array([a.transient for a in accesses], dtype=np.int64)
        self._nbytes = np.array(storages.nbytes, dtype=np.int64)
        self._maker = np.array([-1 if m is None else m for m in storages.maker], dtype=np.int64)
        self._made = np.flatnonzero(self._maker >= 0)
        self._kept = np.array(sorted(storages.kept), dtype=np.int64)
        self._shown = np.array(sorted(storages.shown), dtype=np.int64)
        self._half = storages.half
        edges = [(i, s) for i, access in enumerate(accesses) for s in access.reads]
        self._reader = np.array([i for i, _ in edges], dtype=np.int64)
        self._read = np.array([s for _, s in edges], dtype=np.int64)
        # launches that read what each launch makes
        self._readers: list[list[int]] = [[] for _ in accesses]
        for i, s in edges:
            maker = storages.maker[s]
            if maker is not None:
                self._readers[maker].append(i)
        self._over = [
            (i, made, candidates)
            for i, access in enumerate(accesses)
            for made, candidates in zip(access.makes, access.over, strict=True)
            if candidates
        ]

    def run(self, again: Collection[int] = ()) -> Liveness:
        """Returns the lifetimes if the forward launches `again` run a second time, each just before
        the first launch that needs it."""
        n, size = self._n, self._size
        before = self._before(again)
        runs = sorted(before, key=lambda m: (before[m], m))
        places = {m: before[m] + rank for rank, m in enumerate(runs)}
        earlier = np.bincount(np.array([before[m] for m in runs], dtype=np.int64), minlength=n)
        at = np.arange(n, dtype=np.int64) + np.cumsum(earlier[:n])
        at_again = np.full(n, -1, dtype=np.int64)
        at_again[runs] = [places[m] for m in runs]
        end = n + len(runs)
        # inputs have the maker -1, which indexes the last element
        repeated = np.zeros(n + 1, dtype=bool)
        repeated[list(again)] = True

        first = np.full(2 * size, end, dtype=np.int64)
        first[self._made] = at[self._maker[self._made]]
        twins = self._made[at_again[self._maker[self._made]] >= 0]
        first[size + twins] = at_again[self._maker[twins]]
        last = np.where(first < end, first, -1)
        late = np.full(2 * size, end, dtype=np.int64)

        twin = size * repeated[self._maker[self._read]]
        in_backward = self._backward[self._reader]
        target = self._read + np.where(in_backward, twin, 0)
        np.maximum.at(last, target, at[self._reader])
        np.minimum.at(late, target[in_backward], at[self._reader[in_backward]])
        if runs:
            edges = at_again[self._reader] >= 0
            target = (self._read + twin)[edges]
            np.maximum.at(last, target, at_again[self._reader[edges]])
            np.minimum.at(late, target, at_again[self._reader[edges]])
        last[self._kept] = end
        if len(self._shown):  # these outputs are read between the halves
            late_half = at[self._half] if self._half < n else end
            last[self._shown] = np.maximum(last[self._shown], late_half)

        over = self._taken(at, places, repeated, last)
        return Liveness(
            at, places, end, first, last, late, over,
            self._alive(at, at_again, end, first, last, twins, over),
        )  # fmt: skip

    def _before(self, again: Collection[int]) -> dict[int, int]:
        """For each launch to run again, the launch before which it must; without those that nothing
        needs.

        A launch that runs again must come before its readers that do, hence the loop from the last
        one.
        """
        chosen = set(again)
        found: dict[int, int] = {}
        for m in sorted(chosen, reverse=True):
            needed = [
                i if self._backward[i] else found.get(i, self._n)
                for i in self._readers[m]
                if self._backward[i] or i in chosen
            ]
            first = min(needed, default=self._n)
            if first < self._n:
                found[m] = first
        return found

    def _taken(
        self, at: Numbers, places: dict[int, int], repeated: npt.NDArray[np.bool_], last: Numbers
    ) -> dict[int, int]:
        """Maps each storage to the one whose memory it reuses: the first candidate that is free by
        then."""
        size, until = self._size, last.tolist()
        over: dict[int, int] = {}
        taken: set[int] = set()
        for i, made, candidates in self._over:
            ways = [(int(at[i]), 0, bool(self._backward[i]))]
            if i in places:
                ways.append((places[i], size, True))
            for place, shift, late in ways:
                for x in candidates:
                    if late and repeated[self._maker[x]]:
                        x += size
                    if dies(until[x], place) and x not in taken:
                        taken.add(x)
                        over[made + shift] = x
                        break
        return over

    def _alive(
        self, at: Numbers, at_again: Numbers, end: int, first: Numbers, last: Numbers,
        twins: Numbers, over: dict[int, int],
    ) -> Numbers:  # fmt: skip
        """The bytes alive at each position of the sequence."""
        size = self._size
        made = np.concatenate([self._made, size + twins])
        nbytes = self._nbytes[made % size] if size else made
        change = np.zeros(end + 2, dtype=np.int64)
        np.add.at(change, first[made], nbytes)
        np.subtract.at(change, last[made] + 1, nbytes)
        heirs = np.array(list(over), dtype=np.int64)
        if len(heirs):  # at the position where both are alive they share memory
            nbytes = self._nbytes[heirs % size]
            np.subtract.at(change, first[heirs], nbytes)
            np.add.at(change, first[heirs] + 1, nbytes)
        alive = np.cumsum(change)[:end]
        alive[at] += self._transient
        done = np.flatnonzero(at_again >= 0)
        alive[at_again[done]] += self._transient[done]
        return alive


def dies(last: int, place: int) -> bool:
    """Whether the launch at `place` may overwrite memory that is last read at `last`."""
    return last <= place
