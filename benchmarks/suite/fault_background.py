"""Background saves (R32): the same bytes as a save that waits, and what a step waits for them."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from suite.fault_process import answer_of
from suite.fault_systems import System, Task, Watch
from suite.fault_table import GOOD, Effort, Line, Tally, row
from suite.progress import Clock, say

BETWEEN = 50  # steps between saves
# a model of which a checkpoint has some 20 MB, and a step takes tens of milliseconds
LARGER = Task(
    save_every=0, window=1, rows=8, tokens=64, width=160, layers=4, vocabulary=2000, samples=400
)


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """A disk that takes so long for each write and fsync of other threads than the main one."""
    calls: dict[str, Callable[..., Any]] = {"write": os.write, "fsync": os.fsync}

    def slow(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(seconds)
            return calls[name](*arguments)

        return call

    for name in calls:
        setattr(os, name, slow(name))
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(os, name, call)


def trainer_of(task: Task) -> tuple[Any, Any]:
    """A Trainer and a batch of its task."""
    import onward

    model = task.model()
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    samples = [task.data()[i] for i in range(task.rows)]
    return trainer, {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def equal_saves(folder: Path, count: int) -> tuple[int, int]:
    """How many of `count` background saves, with two steps made while each is written, are byte for
    byte the save that waited; and how many steps ended before their write did."""
    trainer, batch = trainer_of(Task())
    equal = overlapped = 0
    trainer.train_step(**batch)
    with slow_disk(0.002):
        for _ in range(count):
            trainer.train_step(**batch)
            waited = trainer.save(folder / "waited", save_total_limit=1)
            path = trainer.save(folder / "written", background=True, save_total_limit=1)
            for _ in range(2):
                trainer.train_step(**batch)
                overlapped += any(
                    t.name == "onward checkpoint writer" for t in threading.enumerate()
                )
            trainer.finish_saves()
            equal += content(waited) == content(path)
    return equal, overlapped


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stall(folder: Path, repeats: int) -> dict[str, float]:
    """Seconds: of 50 steps, of as many with a background save among them, and of saves."""
    trainer, batch = trainer_of(LARGER)
    for _ in range(5):
        trainer.train_step(**batch)
    plain: list[float] = []
    saving: list[float] = []
    calls: list[float] = []
    waiting: list[float] = []
    with slow_disk(0.02):
        for _ in range(repeats):
            for with_save in (False, True):
                begin = time.perf_counter()
                for number in range(BETWEEN):
                    if with_save and number == 0:
                        called = time.perf_counter()
                        trainer.save(folder, background=True, save_total_limit=1)
                        calls.append(time.perf_counter() - called)
                    trainer.train_step(**batch)
                (saving if with_save else plain).append(time.perf_counter() - begin)
                trainer.finish_saves()
    for _ in range(repeats):
        trainer.train_step(**batch)
        begin = time.perf_counter()
        path = trainer.save(folder, save_total_limit=1)
        waiting.append(time.perf_counter() - begin)
    return {
        "plain": statistics.median(plain),
        # the difference is of neighbours, for which the load of the machine is nearly the same
        "stall": statistics.median(b - a for a, b in zip(plain, saving, strict=True)),
        "call": statistics.median(calls),
        "waiting": statistics.median(waiting),
        "bytes": sum(f.stat().st_size for f in path.iterdir()),
    }


def waiting_save(system: System, folder: Path, repeats: int) -> tuple[float, float]:
    """Median seconds of a peer's save, and of its step."""
    watch, saves, steps = Watch(), list[float](), list[float]()
    began, last = 0.0, 0.0

    def save(updates: int) -> None:
        nonlocal began
        began = time.perf_counter()

    def step(number: int) -> None:
        nonlocal began, last
        now = time.perf_counter()
        if began:
            saves.append(now - began)
        elif last:
            steps.append(now - last)
        began, last = 0.0, time.perf_counter()

    watch.save, watch.step = save, step
    task = Task(**{**vars(LARGER), "save_every": 5, "updates": 5 * (repeats + 1), "keep": 1})
    system(task, folder, watch)
    return statistics.median(saves), statistics.median(steps)


def background(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R32."""
    same = Line("background saves that equal a save that waits, steps going on, slow disk")
    stalls = Line(f"what training waits for one save in {BETWEEN} steps")
    for name, system in systems.items():
        same.cells[name], stalls.cells[name] = Tally(text="none"), Tally()
        if name == "Onward":
            tally = same.cells[name] = Tally()
            equal, overlapped = answer_of(lambda: equal_saves(work / "equal", effort.saves))
            for number in range(effort.saves):
                tally.add(GOOD if number < equal else "other bytes")
            tally.text = f"{overlapped} steps were made while they were written"
            found = answer_of(lambda: stall(work / "stall", effort.repeats))
            stalls.cells[name].text = (
                f"{1e3 * found['stall']:.0f} ms, {found['stall'] / found['plain']:.1%} of "
                f"{1e3 * found['plain']:.0f} ms (the call: {1e3 * found['call']:.0f} ms; a save "
                f"that waits: {1e3 * found['waiting']:.0f} ms, {found['bytes'] / 1e6:.0f} MB)"
            )
        else:
            folder = work / f"{name}-waiting"
            seconds, step = answer_of(lambda s=system, f=folder: waiting_save(s, f, effort.repeats))
            stalls.cells[name].text = (
                f"{1e3 * seconds:.0f} ms, {seconds / (BETWEEN * step):.1%} of "
                f"{1e3 * BETWEEN * step:.0f} ms; nothing is fsynced"
            )
        say(f"R32 {name}: {same.cells[name].told()}, {stalls.cells[name].text}")
    promise = (
        "Good: byte for byte. The stall is the difference of 50 steps with a save and 50 without, "
        "in turn, medians; Onward's disk takes 20 ms more for each write and fsync. Of the peers, "
        "which have no background saves: the seconds of a save."
    )
    return row("saves in the background", promise, [same, stalls])
