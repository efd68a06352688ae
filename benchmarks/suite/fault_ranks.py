"""Rows of ranks: one that is lost (R9), one that hangs (R10), ranks that are unlike (R11).

Two processes train together over Gloo, each told to wait 20 s for another. It is counted how long
the others take to end, whether what they say names the rank, which processes are left, and whether
a run that torchrun starts again ends as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite import rank_faults_program as program
from suite.fault_table import Effort, Line, Tally, row
from suite.progress import Clock, say

NAMES = list(program.SYSTEMS)
LIMIT = 90.0  # seconds after a fault, after which others are said to hang
_MOST = 400.0  # seconds of a run, with imports and a start anew
RANKS = 2
_MARK = "ONWARD_FAULT_OF_RANKS"
_NAMED = re.compile(r"\brank 1\b|\[rank1\].*another rank", re.IGNORECASE)


@dataclass
class RunOfRanks:
    """The end of a run. codes: of processes that have ended by themselves, by rank. seconds: from
    the fault to the end of the last rank that nothing happened to. said: what that rank said at
    last. left: processes that are there when all should have ended. ends: what ranks wrote."""

    codes: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    said: str = ""
    left: int = 0
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def names_rank(self) -> bool:
        """Whether the last rank is named, by its number."""
        return bool(_NAMED.search(self.said))


def run(system: str, fault: str, is_restarted: bool = False) -> RunOfRanks:
    """Runs both ranks with a fault; by torchrun, which may start them again, where it says so."""
    with tempfile.TemporaryDirectory(prefix="onward-ranks-") as place:
        folder = Path(place)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = {**os.environ, _MARK: place, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""}
        given |= {"PYTHONPATH": os.pathsep.join([*(p for p in sys.path if p)])}
        module = ["-m", "suite.rank_faults_program", system, fault, place]
        begun = time.time()
        if is_restarted:
            given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            launcher = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc-per-node={RANKS}", "--max-restarts=1"]  # fmt: skip
            processes = [_started([*launcher, *module], given, folder / "said0")]
        else:
            places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes = [
                _started(module, {**given, **places, "RANK": str(r), "LOCAL_RANK": str(r),
                                  "WORLD_SIZE": str(RANKS)}, folder / f"said{r}")
                for r in range(RANKS)
            ]  # fmt: skip
        return _ended(processes, folder, begun, fault)


def _started(words: Sequence[str], given: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as into:
        return subprocess.Popen(
            [sys.executable, *words], env=dict(given), stdout=into, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def _ended(
    processes: Sequence[subprocess.Popen[bytes]], folder: Path, begun: float, fault: str
) -> RunOfRanks:
    """Waits for all but a rank that hangs; then ends what is left, and counts it."""
    hangs = fault in (program.STOPPED, program.ASLEEP)
    others = processes[:-1] if hangs and len(processes) > 1 else processes
    found = RunOfRanks()
    happened = folder / "happened"
    until = begun + _MOST
    while time.time() < until and any(p.poll() is None for p in others):
        time.sleep(0.05)
        if fault != program.RESTARTED and happened.exists():
            until = min(until, happened.stat().st_mtime + LIMIT)
    end = time.time()
    found.codes = {r: p.returncode for r, p in enumerate(processes) if p.poll() is not None}
    time.sleep(1.0)
    own = [processes[-1].pid] if hangs else []
    left = [pid for pid in _marked(str(folder)) if pid not in own]
    found.left = len(left)
    for pid in {*left, *(p.pid for p in processes if p.poll() is None)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait(30)
    start = float(happened.read_text(encoding="ascii")) if happened.exists() else begun
    found.seconds = end - start
    found.said = (folder / "said0").read_text(encoding="utf-8", errors="replace")[-6000:]
    for path in folder.glob("end*"):
        found.ends[int(path.name[3:])] = json.loads(path.read_text(encoding="ascii"))
    return found


def _marked(place: str) -> list[int]:
    """The processes that were started for a run, or by one of it."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{_MARK}={place}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


# ---- the rows


def _others_end(found: RunOfRanks) -> str:
    """The outcome of a case in which the others have to end, and to name the rank."""
    if 0 not in found.codes:
        return f"hung for {LIMIT:.0f} s"
    if found.codes[0] == 0:
        return "trained on"
    if found.left:
        return f"left {found.left} processes"
    return "" if found.names_rank else "ended without naming the rank"


def _told(tally: Tally, seconds: Sequence[float]) -> None:
    if seconds:
        tally.text = f"after {sorted(seconds)[len(seconds) // 2]:.0f} s"


def _names(systems: Mapping[str, Any]) -> list[str]:
    """The systems that are asked for; DDP by hand stands in accelerate's place."""
    return [n for n in NAMES if n in systems or (n == "DDP" and "accelerate" in systems)]


def _row_of_ends(
    title: str,
    promise: str,
    faults: Sequence[str],
    names: Sequence[str],
    effort: Effort,
    clock: Clock,
) -> dict[str, Any]:
    lines: list[Line] = []
    for fault in faults:
        line = Line(f"one of two ranks is {fault}")
        for system in names:
            tally, seconds = Tally(), list[float]()
            for _ in range(min(3, effort.repeats)):
                if clock.over():
                    break
                found = run(system, fault)
                tally.add(_others_end(found))
                seconds.append(found.seconds)
            _told(tally, seconds)
            line.cells[system] = tally
            say(f"{fault}, {system}: {tally.told()}")
        lines.append(line)
    return row(title, promise, lines, systems=list(names))


def lost(effort: Effort, systems: Mapping[str, Any], work: Path, clock: Clock) -> dict[str, Any]:
    """R9: a rank is killed; and by torchrun with one restart the run ends as one without."""
    found = _row_of_ends(
        "a rank is lost",
        "The other rank ends with a status other than 0, names the rank that is lost, and leaves "
        "no process; a run that torchrun starts again ends with the same weights and moments as "
        "one that nothing happened to.",
        [program.KILLED], _names(systems), effort, clock,
    )  # fmt: skip
    line = Line("killed, and started again by torchrun --max-restarts=1: bit for bit")
    for system in _names(systems):
        tally = Tally()
        if not clock.over():
            whole = run(system, "nothing", is_restarted=True)
            again = run(system, program.RESTARTED, is_restarted=True)
            tally.add(_resumed(whole, again))
            tally.text = f"after {again.seconds:.0f} s"
        line.cells[system] = tally
        say(f"restarted, {system}: {tally.told()}")
    found["lines"].append(line.told())
    return found


def _resumed(whole: RunOfRanks, again: RunOfRanks) -> str:
    if len(whole.ends) < RANKS:
        return "the whole run did not end"
    if len(again.ends) < RANKS:
        return "did not end"
    if any(again.ends[r]["from"] == 0 for r in range(RANKS)):
        return "began anew"
    if any(again.ends[r]["digest"] != whole.ends[r]["digest"] for r in range(RANKS)):
        return "ended with other bits"
    return f"left {again.left} processes" if again.left else ""


def hung(effort: Effort, systems: Mapping[str, Any], work: Path, clock: Clock) -> dict[str, Any]:
    """R10: a rank is stopped, or does not come back from its data loader."""
    return _row_of_ends(
        "a rank hangs",
        f"After {program.TIMEOUT:.0f} s, which each system is told to wait, the other rank ends, "
        "and names the rank that does not come.",
        [program.STOPPED, program.ASLEEP], _names(systems), effort, clock,
    )  # fmt: skip


def unlike(effort: Effort, systems: Mapping[str, Any], work: Path, clock: Clock) -> dict[str, Any]:
    """R11: a rank has other weights, another model, fewer batches, or NaN in one batch."""
    lines: list[Line] = []
    for fault in (program.WEIGHTS, program.SHAPES, program.SHORT, program.NAN):
        line = Line(f"one of two ranks has {fault}")
        for system in _names(systems):
            tally = Tally()
            if not clock.over():
                found = run(system, fault)
                tally.add(_nan(found) if fault == program.NAN else _refused(found, fault))
                tally.text = f"after {found.seconds:.0f} s"
            line.cells[system] = tally
            say(f"{fault}, {system}: {tally.told()}")
        lines.append(line)
    promise = (
        "Ranks that differ are refused, and what differs is named; or they end with the same "
        "weights, as those do whose weights rank 0 sends to all. NaN of one rank spoils no "
        "weights, and the rank is named. Nobody hangs."
    )
    return row("ranks are unlike", promise, lines, systems=_names(systems))


def _refused(found: RunOfRanks, fault: str) -> str:
    if 0 not in found.codes or 1 not in found.codes:
        return f"hung for {LIMIT:.0f} s"
    if all(code == 0 for code in found.codes.values()):
        digests = {end["digest"] for end in found.ends.values()}
        return "" if len(digests) == 1 else "trained on, apart"
    if found.left:
        return f"left {found.left} processes"
    return "" if found.names_rank else "ended without naming the rank"


def _nan(found: RunOfRanks) -> str:
    if 0 not in found.codes or 1 not in found.codes:
        return f"hung for {LIMIT:.0f} s"
    if any(found.codes.values()):
        return "" if found.names_rank else "ended without naming the rank"
    if not all(end["finite"] for end in found.ends.values()):
        return "NaN in the weights"
    return "" if found.names_rank else "left the update out, without naming the rank"


__all__ = ["NAMES", "hung", "lost", "run", "unlike"]
