"""Clocks: which parameters have always moved together, and so share a count of updates.

A clock is one input of a step graph. torch counts updates by parameter; one count for each group of
parameters is enough, as long as every graph moves all of the group or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch


class Clocks:
    """Parameters by clock; `counts`, where it is asked for, are updates by parameter."""

    def __init__(self) -> None:
        self._of: dict[torch.Tensor, int] = {}
        self._members: dict[int, tuple[torch.Tensor, ...]] = {}
        self._used: set[int] = set()  # clocks that are in some graph
        self._next = 0

    def of(self, parameter: torch.Tensor) -> int:
        """Its clock."""
        return self._of[parameter]

    def members(self, clock: int) -> tuple[torch.Tensor, ...]:
        """The parameters that it counts."""
        return self._members[clock]

    def assign(
        self, parameters: Iterable[torch.Tensor], counts: Mapping[torch.Tensor, int]
    ) -> None:
        """Gives clocks to parameters that have none: one for each count."""
        by_count: dict[int, list[torch.Tensor]] = {}
        for p in parameters:
            if p not in self._of:
                by_count.setdefault(counts.get(p, 0), []).append(p)
        for together in by_count.values():
            self._members[self._next] = tuple(together)
            self._of |= dict.fromkeys(together, self._next)
            self._next += 1

    def part(self, clocks: Iterable[int], moving: Collection[torch.Tensor]) -> bool:
        """Takes from these clocks the parameters that a new graph does not move. Returns whether a
        clock of an earlier graph was parted, which is then wrong."""
        parted = False
        for clock in clocks:
            members = self._members.get(clock, ())
            stay = tuple(p for p in members if p in moving)
            for p in set(members) - set(stay):
                del self._of[p]
            parted |= len(stay) < len(members) and clock in self._used
            self._members[clock] = stay
            self._used.add(clock)
            if not stay:
                del self._members[clock]
        return parted

    def disagree(self, counts: Mapping[torch.Tensor, int]) -> bool:
        """Whether parameters of one clock have come to different counts."""
        found = ({counts.get(p, 0) for p in members} for members in self._members.values())
        return any(len(counts) > 1 for counts in found)

    def clear(self) -> None:
        """No parameter has a clock, and no graph."""
        self._of.clear()
        self._members.clear()
        self._used.clear()
        self._next = 0
