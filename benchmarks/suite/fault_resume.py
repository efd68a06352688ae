"""Runs that are stopped and resumed, beside one that nothing stops, bit for bit (R6, R31)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from suite.fault_kill import STUCK, WRONG, finished
from suite.fault_systems import System, Task
from suite.fault_table import GOOD, Effort, Line, Tally, row
from suite.progress import Clock, say

Draw = random.Random


@dataclass(frozen=True)
class Kind:
    """How runs are stopped: after which micro-batches (24 in two epochs, two make an update).

    workers: those that load data, of the processes in turn. windows: whether stops lie within
    accumulation windows, where transformers and accelerate's examples save nothing.
    """

    what: str
    stops: Callable[[Draw, int], list[int]]
    workers: tuple[int, ...] = (0,)
    random: bool = False
    windows: bool = False


def once(draw: Draw, number: int) -> list[int]:
    return [draw.choice([2, 4, 6, 8, 10, 14, 16, 18, 20, 22])]


def at_the_end(draw: Draw, number: int) -> list[int]:
    return [[10], [12], [14], [10, 12, 14]][number % 4]


def several(count: int, of: range) -> Callable[[Draw, int], list[int]]:
    return lambda draw, number: sorted(draw.sample(of, count))


KINDS = (
    Kind("once, within an epoch", once),
    Kind("an update before an epoch's end, at it, behind it", at_the_end),
    Kind("three times within one epoch", several(3, range(2, 11, 2))),
    Kind("within an accumulation window", several(1, range(1, 24, 2)), windows=True),
    Kind("once; two workers load", once, workers=(2,)),
    Kind("once; samples draw random numbers", once, random=True),
    Kind("once; samples draw random numbers, two workers load", once, workers=(2,), random=True),
    Kind("five times; other numbers of workers", several(5, range(2, 23, 2)), workers=(0, 2, 1)),
)


def resumed(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R6 and R31: the digest of weights and moments at the end of a run."""
    lines = [Line(kind.what) for kind in KINDS]
    for name, system in systems.items():
        draw = random.Random(9)
        whole: dict[Task, str] = {}
        for kind, line in zip(KINDS, lines, strict=True):
            tally = line.cells[name] = Tally()
            if kind.windows and name != "Onward":
                tally.text = "saves between updates alone"
                continue
            task = Task(save_every=0, random=kind.random, workers=kind.workers[0])
            if task not in whole:
                whole[task] = finished(system, task, work / f"{name}-whole-{len(whole)}").answer
            for number in range(effort.stops):
                if clock.over():
                    break
                folder = work / f"{name}-{KINDS.index(kind)}-{number}"
                tally.add(chain(system, task, kind, kind.stops(draw, number), folder, whole[task]))
            say(f"R6 {name}, {kind.what}: {tally.good} of {tally.tried} {dict(tally.bad)}")
    promise = (
        "Runs with dropout and shuffling that save, end, and are started again. Good: weights and "
        "moments at the end are bit for bit those of the same system's run that nothing stopped. "
        f'"{WRONG}": they are not, and nothing was said.'
    )
    return row("stopped and resumed", promise, lines)


def chain(
    system: System, task: Task, kind: Kind, stops: list[int], folder: Path, whole: str
) -> str:
    """A run in as many processes as there are stops and one more."""
    for turn, stop in enumerate([*stops, 0]):
        workers = kind.workers[turn % len(kind.workers)]
        ended = finished(system, replace(task, stop=stop, workers=workers), folder)
        if ended.status:
            return STUCK
    return GOOD if ended.answer == whole else WRONG
