"""Random damage in a checkpoint (R3): is it found before use, used without a word, or imagined?"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from suite.fault_kill import accepted, finished
from suite.fault_process import Ended, in_child
from suite.fault_systems import System, Task, Watch
from suite.fault_table import GOOD, Effort, Line, Tally, row
from suite.progress import Clock, say

USED = "used without a word, other numbers"
UNSEEN = "unseen, same numbers"
ALARM = "called damaged"


def flip(path: Path, older: Path, draw: random.Random) -> None:
    """One bit, as of a disk or a cable."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(path: Path, older: Path, draw: random.Random) -> None:
    """The end is missing, as of a copy that was stopped."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def blank(path: Path, older: Path, draw: random.Random) -> None:
    """A block of zeros, as of what a disk has not written when the power went."""
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    size = min(4096, len(data) - start)
    if not any(data[start : start + size]):  # zeros already: elsewhere
        start, size = 0, min(4096, len(data))
    data[start : start + size] = bytes(size)
    path.write_bytes(data)


def swap(path: Path, older: Path, draw: random.Random) -> None:
    """The file of that name from the checkpoint before, as of a copy that was stopped."""
    other = older / path.name
    if not other.exists() or other.read_bytes() == path.read_bytes():
        return flip(path, older, draw)
    shutil.copy(other, path)
    return None


def lose(path: Path, older: Path, draw: random.Random) -> None:
    """The file is missing."""
    path.unlink()


DAMAGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "a flipped bit": flip,
    "cut off": cut,
    "a block of zeros": blank,
    "a file of the checkpoint before": swap,
    "a missing file": lose,
}


def damaged(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R3: one fault in a random file of the newest of two checkpoints."""
    task = Task(keep=2)
    lines = {kind: Line(kind) for kind in DAMAGES}
    clean = Line("no damage: false alarms")
    for name, system in systems.items():
        draw = random.Random(3)
        home = work / name
        sound = accepted(system, home)
        base = home / "base"
        finished(system, replace(task, stop=2 * task.save_every * task.window), base)
        older, newest = sorted(path for path in base.iterdir() if path.is_dir())
        for line in (*lines.values(), clean):
            line.cells[name] = Tally()
        on = dict.fromkeys(DAMAGES, 0)
        for number in range(effort.damages):
            if clock.over():
                break
            kind = list(DAMAGES)[number % len(DAMAGES)]
            folder = shutil.copytree(base, home / f"damaged-{number}")
            files = sorted(p for p in (folder / newest.name).iterdir() if p.stat().st_size)
            DAMAGES[kind](draw.choice(files), folder / older.name, draw)
            found = again(system, task, folder)
            lines[kind].cells[name].add(outcome(found, sound, 2 * task.save_every))
            on[kind] += found.status == 0 and found.answer[1] < 2 * task.save_every
            shutil.rmtree(folder)
        for kind, line in lines.items():
            if on[kind]:
                line.cells[name].text = f"{on[kind]} went on from the checkpoint before"
        for number in range(effort.clean):
            if clock.over():
                break
            folder = shutil.copytree(base, home / f"clean-load-{number}")
            found = again(system, task, folder)
            whole = found.status == 0 and found.answer == [found.answer[0], 2 * task.save_every]
            clean.cells[name].add(GOOD if whole and found.answer[0] in sound else ALARM)
            shutil.rmtree(folder)
        say(f"R3 {name}: {[(k, x.cells[name].told()) for k, x in lines.items()]}")
    promise = (
        "One fault in a file of the newest of two checkpoints, drawn at random, files alike; then "
        "the same script is started again. Good: the fault is found before any number of the file "
        "is used: the script ends with an error, or goes on from the checkpoint before. "
        f'"{USED}": nothing was said and the run ends otherwise. "{UNSEEN}": the file is not read '
        "or the fault lies where nothing is kept."
    )
    return row("a damaged checkpoint", promise, [*lines.values(), clean])


def again(system: System, task: Task, folder: Path) -> Ended:
    """A run that goes on; its answer is the digest and the updates that it did not have to do."""

    def run() -> tuple[str, int]:
        watch = Watch()
        return system(task, folder, watch), watch.resumed

    return in_child(run)


def outcome(ended: Ended, sound: set[str], newest: int) -> str:
    """What became of a run with a fault in its checkpoint of update number `newest`."""
    if ended.status:
        return GOOD
    digest, resumed = ended.answer
    if digest not in sound:
        return USED
    return GOOD if resumed < newest else UNSEEN
