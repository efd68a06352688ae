"""KeyboardInterrupt at random moments of an update, in a loop of one's own (a part of R8)."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path

from suite.fault_process import answer_of, in_child
from suite.fault_systems import System, Task, Watch
from suite.fault_table import GOOD, Effort, Tally
from suite.progress import Clock

TORN = "partly updated, not said"
TASK = Task(save_every=0)
BEGIN = 4 * TASK.window + 1  # the first micro-batch of the update that is interrupted
END = BEGIN + TASK.window  # and the first one behind it


def within_updates(effort: Effort, system: System, work: Path, clock: Clock) -> Tally:
    """The exception comes by a timer, as it does after Ctrl-C."""
    tally, draw, refused = Tally(), random.Random(4), 0
    whole, seconds = answer_of(lambda: reference(system, work / "reference"))
    assert whole[0] != whole[-1], "the update changes nothing"
    for count in range(effort.interrupts):
        if clock.over():
            break
        moment = max(1e-4, draw.uniform(0.0, seconds))
        ended = in_child(lambda m=moment, c=count: interrupted(system, m, work / f"{c}"))
        answer = str(ended.answer)
        refused += answer.startswith("refused")
        sound = answer in whole or answer.startswith("refused")
        tally.add(GOOD if sound and not ended.status else TORN)
    if refused:
        tally.text = f"{refused} refused"
    return tally


def reference(system: System, folder: Path) -> tuple[list[str], float]:
    """The digests before the update of a run and behind each of its micro-batches, whose gradients
    are part of a Trainer's state, and the seconds that it takes."""
    watch, found = Watch(), list[str]()
    spent = since = 0.0

    def step(number: int) -> None:
        nonlocal spent, since
        if BEGIN < number <= END:
            spent += time.perf_counter() - since
        if BEGIN <= number <= END:
            found.append(watch.state())
        if number == END:
            raise SystemExit(0)
        since = time.perf_counter()

    watch.step = step
    with contextlib.suppress(SystemExit):
        system(TASK, folder, watch)
    return found, spent


def interrupted(system: System, moment: float, folder: Path) -> str:
    """The digest of a run that is interrupted `moment` seconds after its update began, or why the
    system goes no further with what it has."""
    watch = Watch()

    def step(number: int) -> None:
        if number == BEGIN:
            signal.setitimer(signal.ITIMER_REAL, moment)
        elif number == END:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise KeyboardInterrupt

    watch.step = step
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        system(TASK, folder, watch)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        return watch.state()
    except Exception as error:
        return f"refused: {error}"
