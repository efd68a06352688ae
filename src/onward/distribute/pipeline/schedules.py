"""Schedules of pipelines: which rank runs which part of which micro-batch when, as tables.

Stage s is on rank s mod P, and each rank runs its actions one after the other. Names are those of
torch.distributed.pipelining. With P ranks, V stages a rank and M micro-batches, where a backward
takes twice as long as a forward, a rank is idle for this share of the time:

    GPipe                  all forwards, then all backwards (arXiv 1811.06965)     (P-1)/(M+P-1)
    1F1B                   forwards and backwards in turn (arXiv 1806.03377)       (P-1)/(M+P-1)
    Interleaved1F1B        the same with V stages a rank (arXiv 2104.04473)        (P-1)/(VM+P-1)
    InterleavedZeroBubble  backwards in two parts (arXiv 2401.10241)               less

Gradients of a stage are computed in the order of the micro-batches in each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from onward.errors import OnwardError


class Part(Enum):
    """What an action computes of a stage. BACKWARD is INPUT and WEIGHT in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # the gradients that other stages wait for
    WEIGHT = "W"  # the gradients of the stage's own weights


@dataclass(frozen=True)
class Action:
    """A part of a stage's work on one micro-batch; prints as `2F0`: stage 2, micro-batch 0."""

    part: Part
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.part.value}{self.micro}"


Table: TypeAlias = list[list[Action]]  # the actions of each rank, in order
COSTS: Mapping[Part, int] = {Part.FORWARD: 1, Part.BACKWARD: 2, Part.INPUT: 1, Part.WEIGHT: 1}
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")  # with several stages a rank
SCHEDULES = ("GPipe", "1F1B", *INTERLEAVED)


def schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Table:
    """The table of a schedule, one of SCHEDULES. Raises OnwardError for stages or micro-batches
    that it does not go with."""
    if name not in SCHEDULES:
        raise OnwardError(
            f"pipeline_schedule={name!r} is unknown; fix: one of {', '.join(SCHEDULES)}"
        )
    if stages_per_rank > 1 and name not in INTERLEAVED:
        raise OnwardError(
            f"{name} has one stage a rank, not {stages_per_rank}; fix: {' or '.join(INTERLEAVED)}"
        )
    if name == "GPipe":
        return [_gpipe(rank, micro_batches) for rank in range(ranks)]
    if name == "1F1B":
        return [_one_in_turn(rank, ranks, micro_batches) for rank in range(ranks)]
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise OnwardError(
            f"{name} takes micro-batches in rounds of one for each of the {ranks} ranks or more, "
            f"and {micro_batches} do not make {rounds} equal rounds; fix: a multiple of {ranks}"
        )
    turns = _Turns(ranks, stages_per_rank, micro_batches, micro_batches // rounds)
    if name == "Interleaved1F1B":
        return [turns.table(rank, 2, Part.BACKWARD) for rank in range(ranks)]
    return _with_weights_later([turns.table(rank, 1, Part.INPUT) for rank in range(ranks)])


def _gpipe(rank: int, micro_batches: int) -> list[Action]:
    every = range(micro_batches)
    return [Action(part, rank, m) for part in (Part.FORWARD, Part.BACKWARD) for m in every]


def _one_in_turn(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Forwards until the first backward can come, then a backward behind each forward."""
    first = min(micro_batches, ranks - 1 - rank)
    return _in_turn(
        [Action(Part.FORWARD, rank, m) for m in range(micro_batches)],
        [Action(Part.BACKWARD, rank, m) for m in range(micro_batches)],
        first,
    )


def _in_turn(forwards: list[Action], backwards: list[Action], first: int) -> list[Action]:
    """The first forwards, then one forward and one backward in turn, then what is left."""
    found = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        found += [forward, backward]
    return found + backwards[len(forwards) - first :]


@dataclass(frozen=True)
class _Turns:
    """Interleaved stages. together: micro-batches that run through one stage of a rank before its
    next stage has its turn."""

    ranks: int
    stages: int
    micro_batches: int
    together: int

    def table(self, rank: int, ahead: int, backward: Part) -> list[Action]:
        """The actions of a rank. ahead: forwards more for each rank behind it, before its first
        backward."""
        number = self.stages * self.micro_batches
        first = (self.stages - 1) * self.together + ahead * (self.ranks - 1 - rank)
        forwards = [self._action(Part.FORWARD, rank, k, False) for k in range(number)]
        backwards = [self._action(backward, rank, k, True) for k in range(number)]
        return _in_turn(forwards, backwards, min(first, number))

    def _action(self, part: Part, rank: int, k: int, back: bool) -> Action:
        turn = (k // self.together) % self.stages
        local = self.stages - 1 - turn if back else turn
        micro = k // (self.together * self.stages) * self.together + k % self.together
        return Action(part, local * self.ranks + rank, micro)


def _with_weights_later(table: Table) -> Table:
    """Puts the gradients of weights where a rank would be idle, and each rank's at most as many
    backwards late as there are ranks before it, so that no rank holds more than the first."""
    made: Table = [[] for _ in table]
    left = [deque(actions) for actions in table]
    late: list[deque[Action]] = [deque() for _ in table]
    ends: dict[Action, int] = {}
    stages, now = _stages(table), 0
    busy = [0] * len(table)
    while any(left) or any(late):
        for rank, actions in enumerate(left):
            if busy[rank] > now:
                continue
            ready = bool(actions) and all(
                ends.get(other, now + 1) <= now for other in needs(actions[0], stages)
            )
            is_due = len(late[rank]) > rank
            if late[rank] and (is_due or not ready):
                action = late[rank].popleft()
            elif ready:
                action = actions.popleft()
                if action.part is Part.INPUT:
                    late[rank].append(Action(Part.WEIGHT, action.stage, action.micro))
            else:
                continue
            made[rank].append(action)
            ends[action] = busy[rank] = now + COSTS[action.part]
        now += 1
        assert now <= 8 * sum(map(len, table)) + 8, "a schedule waits for itself"
    return made


# ---- when actions run


@dataclass(frozen=True)
class Timeline:
    """When each action of a table starts and ends, where every rank runs its next action as soon as
    what that needs is there."""

    starts: Mapping[Action, int]
    ends: Mapping[Action, int]

    @property
    def length(self) -> int:
        """The time from the first action to the end of the last one."""
        return max(self.ends.values())

    def idle(self, actions: Sequence[Action]) -> float:
        """The share of the time in which the rank with these actions has nothing to do."""
        return 1 - sum(self.ends[a] - self.starts[a] for a in actions) / self.length


def needs(action: Action, stages: int) -> list[Action]:
    """The actions whose results an action reads, whichever way a table splits backwards."""
    stage, micro = action.stage, action.micro
    if action.part is Part.FORWARD:
        return [Action(Part.FORWARD, stage - 1, micro)] if stage else []
    if action.part is Part.WEIGHT:
        return [Action(Part.INPUT, stage, micro)]
    own = [Action(Part.FORWARD, stage, micro)]
    return own + ([Action(action.part, stage + 1, micro)] if stage + 1 < stages else [])


def timeline(table: Table, costs: Mapping[Part, int] = COSTS) -> Timeline:
    """Runs a table on paper. costs: the time of each part. Raises ValueError where ranks would wait
    for one another for ever."""
    starts: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    left = [deque(actions) for actions in table]
    free = [0] * len(table)
    stages = _stages(table)
    while any(left):
        moved = False
        for rank, actions in enumerate(left):
            while actions and all(other in ends for other in needs(actions[0], stages)):
                action = actions.popleft()
                before = [ends[other] for other in needs(action, stages)]
                starts[action] = max([free[rank], *before])
                ends[action] = free[rank] = starts[action] + costs[action.part]
                moved = True
        if not moved:
            waiting = ", ".join(str(actions[0]) for actions in left if actions)
            raise ValueError(f"the actions {waiting} of a schedule wait for one another")
    return Timeline(starts, ends)


def drawn(table: Table, costs: Mapping[Part, int] = COSTS) -> str:
    """A table as text, one row a rank and one column for each unit of time; dots are idle."""
    found = timeline(table, costs)
    width = max(len(str(a)) for actions in table for a in actions) + 1
    rows: list[str] = []
    for rank, actions in enumerate(table):
        cells = ["."] * found.length
        for a in actions:
            for at in range(found.starts[a], found.ends[a]):
                cells[at] = str(a)
        rows.append(f"rank {rank}  " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(rows)


def _stages(table: Table) -> int:
    return 1 + max((a.stage for actions in table for a in actions), default=0)


__all__ = [
    "COSTS", "INTERLEAVED", "SCHEDULES", "Action", "Part", "Table", "Timeline", "drawn", "needs",
    "schedule", "timeline",
]  # fmt: skip
