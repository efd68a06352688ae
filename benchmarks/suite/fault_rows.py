"""The rows of the table of faults by name, and how a run of some of them joins the others."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.fault_background import background
from suite.fault_checksum import verification
from suite.fault_damage import damaged
from suite.fault_kill import at_random, within_saves
from suite.fault_nan import poisoned
from suite.fault_ranks import hung, lost, unlike
from suite.fault_recovery import recovery
from suite.fault_resume import resumed
from suite.fault_signals import signalled
from suite.fault_systems import SYSTEMS, System, Task, Watch
from suite.fault_table import Effort, table
from suite.progress import Clock

Measure = Callable[[Effort, Mapping[str, System], Path, Clock], dict[str, Any]]

ROWS: dict[str, Measure] = {
    "R1": within_saves,
    "R2": at_random,
    "R3": damaged,
    "R6": resumed,
    "R8": signalled,
    "R9": lost,
    "R10": hung,
    "R11": unlike,
    "R12": poisoned,
    "R32": background,
    "R33": recovery,
    "R34": verification,
}
OF_RANKS = ("R9", "R10", "R11")  # which start processes of their own
TIMED = ("R32", "R33", "R34")
NEEDS_STRACE = ("R1",)
IDLE = 0.6  # load per core above which times are said to be of a loaded machine


def warmed(names: Sequence[str]) -> None:
    """Imports and compiles once, so that forks of this process need not. No autograd is run: its
    threads would be missing in a fork."""
    import accelerate
    from transformers import Trainer
    from transformers.utils import logging as transformers_logging

    assert accelerate and Trainer
    logging.getLogger("onward").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    if "Onward" in names:
        with tempfile.TemporaryDirectory() as place:
            SYSTEMS["Onward"](Task(updates=1, save_every=0), Path(place), Watch())


def measured(
    name: str, effort: Effort, systems: Sequence[str], clock: Clock, report: Mapping[str, Any]
) -> dict[str, Any]:
    """One row, with the machine and the command of its run. Its files are removed."""
    load = os.getloadavg()[0]
    work = Path(tempfile.mkdtemp(prefix="onward-faults-"))
    try:
        found = ROWS[name](effort, {system: SYSTEMS[system] for system in systems}, work, clock)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    found["machine"] = f"{measured_on(report['machine'], load)} `{report['command']}`."
    if name in TIMED and load > IDLE * report["machine"]["cores"]:
        found["machine"] += " The machine was loaded: times say little."
    return found


def measured_on(host: Mapping[str, Any], load: float | None = None) -> str:
    """A line on the machine of a report. load: before a part of it was measured; by default that
    before the whole."""
    load = host["load_before"] if load is None else load
    versions = host["versions"]
    return (
        f"{host['date'][:10]}, {host['cpu']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, commit {host['commit'] or 'unknown'}, load {load:.1f}."
    )


def earlier(folder: Path, name: str) -> dict[str, Any]:
    """The newest report of this name in a folder; empty where there is none."""
    found = sorted(folder.glob(f"{name}-[0-9]*.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else {}


def page(rows: Mapping[str, Any]) -> list[str]:
    """All rows as Markdown, in the order of the table."""
    lines: list[str] = []
    for name in ROWS:
        if name in rows:
            lines += ["", *table(name, rows[name], rows[name].get("systems", list(SYSTEMS)))]
    return lines
