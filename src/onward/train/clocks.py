"""Clocks: counts of updates, each shared by parameters that have always been updated together.

A clock is one input of a step graph. torch counts updates per parameter; one count for each group
of parameters is enough, as long as every graph updates all of the group or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Clocks:
    """An immutable assignment of parameters to clocks; `joined` returns a new one. used: clocks
    that some graph reads. following: the number of the next clock."""

    of: Mapping[torch.Tensor, int] = field(default_factory=dict)
    by_clock: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    used: frozenset[int] = frozenset()
    following: int = 0

    def members(self, clock: int) -> tuple[torch.Tensor, ...]:
        """The parameters that a clock counts."""
        return self.by_clock[clock]

    def joined(
        self,
        parameters: Iterable[torch.Tensor],
        held: Collection[torch.Tensor],
        moving: Collection[torch.Tensor],
        counts: Mapping[torch.Tensor, int],
    ) -> tuple[Clocks, bool]:
        """Adds a new graph with these parameters. Returns the new clocks, and whether the graph
        splits a clock that an earlier graph reads, which makes that graph wrong.

        held: parameters that the optimizer updates. moving: those of them that the new graph
        updates. counts: updates so far, 0 where there are none; parameters without a clock get one
        for each count.
        """
        of, by_clock, following = dict(self.of), dict(self.by_clock), self.following
        by_count: dict[int, list[torch.Tensor]] = {}
        for p in dict.fromkeys(parameters):
            if p not in of:
                by_count.setdefault(counts.get(p, 0), []).append(p)
        for together in by_count.values():
            by_clock[following] = tuple(together)
            of |= dict.fromkeys(together, following)
            following += 1
        clocks, moved, parted = {of[p] for p in held}, set(moving), False
        for clock in clocks:
            members = by_clock.pop(clock)
            stay = tuple(p for p in members if p in moved)
            for p in members:
                if p not in moved:
                    del of[p]
            parted |= len(stay) < len(members) and clock in self.used
            if stay:
                by_clock[clock] = stay
        return Clocks(of, by_clock, self.used | clocks, following), parted

    def disagree(self, counts: Mapping[torch.Tensor, int]) -> bool:
        """Whether parameters of one clock have different counts."""
        found = ({counts.get(p, 0) for p in members} for members in self.by_clock.values())
        return any(len(counts) > 1 for counts in found)


__all__ = ["Clocks"]
