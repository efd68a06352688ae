"""SIGKILL before each call of a save that changes the disk (R1), and at random moments (R2)."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from suite.fault_process import Child, Ended, calls_in, in_child, killed_at, stop_here
from suite.fault_systems import System, Task, Watch
from suite.fault_table import GOOD, Effort, Line, Tally, row
from suite.progress import Clock, say

WRONG = "went on with other numbers"
STUCK = "would not start again"
_SOUND: dict[System, set[str]] = {}


def finished(system: System, task: Task, folder: Path) -> Ended:
    """A run that nothing stops, in a process of its own."""
    return in_child(lambda: system(task, folder, Watch()))


def accepted(system: System, work: Path) -> set[str]:
    """The digests that a sound run of `Task()` may end with: of one that nothing stops, and of
    those that go on from each of its checkpoints; one where a system resumes to the bit."""
    if system not in _SOUND:
        task = Task()
        found = {finished(system, task, work / "whole").answer}
        for stop in range(task.save_every, task.updates, task.save_every):
            folder = work / f"stopped-{stop}"
            finished(system, replace(task, stop=stop * task.window), folder)
            found.add(finished(system, task, folder).answer)
        assert None not in found, "a run without a fault has failed"
        _SOUND[system] = found
    return _SOUND[system]


def outcome(ended: Ended, sound: set[str]) -> str:
    """What became of a run that was killed and begun again."""
    if ended.status:
        return STUCK
    return GOOD if ended.answer in sound else WRONG


def within_saves(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R1: the second checkpoint of a run, which keeps one, killed before each of its calls."""
    task = Task(keep=1)
    line, errors = Line("killed before each call that changes the disk, once"), {}
    for name, system in systems.items():
        home = work / name
        sound = accepted(system, home)
        base = home / "base"
        finished(system, replace(task, stop=task.save_every * task.window), base)
        folder = shutil.copytree(base, home / "traced")
        calls = calls_in(saving(system, task, folder), folder)
        points = calls[:: effort.calls]
        tally = line.cells[name] = Tally(text=f"{len(calls)} calls")
        for number, (call, count) in enumerate(points):
            if clock.over():
                break
            folder = shutil.copytree(base, home / f"at-{number}")
            killed = killed_at(saving(system, task, folder), call, count)
            if killed.status != -9:  # this run made fewer calls
                continue
            again = finished(system, task, folder)
            tally.add(outcome(again, sound))
            if again.status:
                errors.setdefault(name, {}).setdefault(again.last_line, []).append(number)
            shutil.rmtree(folder)
        say(f"R1 {name}: {tally.good} of {tally.tried}, {dict(tally.bad)}")
    promise = (
        "Good: the same script, started again, goes on by itself from a checkpoint that is whole, "
        f'and ends as the run that nothing stopped. "{STUCK}": it ends with an error until a '
        f'person removes a folder. "{WRONG}": it took a part of a checkpoint without a word. The '
        "kill is by strace, before each system call of a save that opens, writes, syncs, renames "
        "or removes something in the run's folder."
    )
    return row("killed within a save", promise, [line], errors=errors)


def saving(system: System, task: Task, folder: Path) -> Child:
    """A process that goes on from `folder`, and has stopped itself before its first save. It ends
    behind the save."""
    saved = False

    def save(updates: int) -> None:
        nonlocal saved
        saved = True
        stop_here()

    def step(number: int) -> None:
        if saved:
            raise SystemExit(0)

    child = Child(lambda: system(task, folder, Watch(step=step, save=save)))
    if not child.stopped():
        raise RuntimeError(f"the run ended without a save: {child.wait()}")
    return child


def at_random(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R2: runs that are killed at three random moments each, and then left alone."""
    task = Task(save_every=1, keep=2)
    line, draw = Line("three kills at random moments of a run, then to its end"), random.Random(5)
    for name, system in systems.items():
        home = work / name
        sound = accepted(system, home)
        began = time.monotonic()
        finished(system, task, home / "timed")
        seconds = time.monotonic() - began
        tally = line.cells[name] = Tally()
        for number in range(effort.kills):
            if clock.over():
                break
            folder = home / f"run-{number}"
            for _ in range(3):
                child = Child(lambda s=system, f=folder: s(task, f, Watch()))
                time.sleep(seconds * draw.uniform(0.1, 1.0))
                child.kill()
                ended = child.wait()
            if ended.status == -9 or ended.status == 0:
                ended = finished(system, task, folder)
            tally.add(outcome(ended, sound))
            shutil.rmtree(folder, ignore_errors=True)
        say(f"R2 {name}: {tally.good} of {tally.tried}, {dict(tally.bad)}")
    promise = (
        "Good and bad as in R1. A checkpoint is saved after every update, so that many kills hit a "
        "save."
    )
    return row("killed at random moments", promise, [line])
