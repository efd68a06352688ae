"""How steps are timed: engines in turn, distinct batches, medians, losses compared.

One process per engine, one of them at work at a time. All times are seconds, all sizes bytes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from suite.cases import Case
from suite.losses import Tolerance, checked
from suite.progress import say
from suite.remote import EngineError, Remote
from suite.workloads import described


@dataclass(frozen=True)
class Effort:
    """How much to measure: `rounds` turns of `steps` timed steps after `warmup` untimed ones.

    alternate: every other round goes through the engines backwards.
    keep: the engines keep their models, for a next case which differs in its batches only.
    """

    rounds: int
    steps: int
    warmup: int
    tolerance: Tolerance
    exact_steps: int = 0  # without dropout, compared step by step; 0 leaves the check out
    slowest: int = 0  # launches of Onward's step to name, with their times
    alternate: bool = False
    keep: bool = False

    @property
    def batches(self) -> int:
        """Distinct batches an engine sees: one for the first step, then warm-up and rounds."""
        return 1 + self.warmup + self.rounds * self.steps


def measure(
    case: Case, remotes: Mapping[str, Remote], effort: Effort, seconds_left: Callable[[], float]
) -> dict[str, Any]:
    """One case under every engine, in turn. An engine that fails is recorded and left out.

    A round that would not end in time is not begun: `rounds` of the result says how many were done.
    """
    results: dict[str, dict[str, Any]] = {}
    running: list[str] = []
    for remote in remotes.values():
        remote.wait()
    for name, remote in remotes.items():
        say(f"{case.name}: {name}: first step")
        entry = results[name] = {"about": remote.engine.about, "seconds": [], "losses": []}
        with _recorded(entry):
            arguments = (case, effort.batches, effort.keep)
            entry |= remote.ask("prepare", *arguments, timeout=seconds_left())
            remote.ask("warm_up", 1, effort.warmup, timeout=seconds_left())
            running.append(name)
    done, longest = 0, 0.0
    while done < effort.rounds and (not done or longest < seconds_left()):
        begin, turn, said = time.monotonic(), done, list[str]()
        for name in running[:: -1 if effort.alternate and turn % 2 else 1]:
            entry = results[name]
            time.sleep(0.2)  # the previous engine's threads stop spinning
            answer: dict[str, Any] = {}
            with _recorded(entry):
                start = 1 + effort.warmup + turn * effort.steps
                answer = remotes[name].ask("run", start, effort.steps, timeout=seconds_left())
                entry["seconds"].append(answer["seconds"])
                entry["losses"] += answer["losses"]
                entry["peak_step_bytes"] = answer["peak_step_bytes"]
                said.append(f"{name} {1e3 * statistics.median(answer['seconds']):.0f}")
            if not answer:
                running.remove(name)
        done, longest = done + 1, max(longest, time.monotonic() - begin)
        say(f"{case.name}: round {done} of {effort.rounds}, ms: {', '.join(said)}")
    exact: dict[str, list[float]] = {}
    for name in running if effort.exact_steps else []:
        with _recorded(results[name]):
            answer = remotes[name].ask("exact", case, effort.exact_steps, timeout=seconds_left())
            exact[name] = answer["losses"]
    for name in running if effort.slowest else []:
        if remotes[name].engine.onward:
            with _recorded(results[name]):
                answer = remotes[name].ask("slowest", effort.slowest, timeout=seconds_left())
                results[name] |= answer
    for remote in remotes.values():
        if remote.alive and not effort.keep:
            with contextlib.suppress(EngineError):
                remote.ask("release", timeout=60.0)
    for entry in results.values():
        _summarise(entry, case)
    checks = checked(results, exact, effort.tolerance)
    return {
        "case": described(case),
        "rounds": done,
        "engines": results,
        "checks": checks,
    }


@contextlib.contextmanager
def _recorded(entry: dict[str, Any]) -> Iterator[None]:
    """An engine's failure becomes a line of the table, not the end of the run."""
    try:
        yield
    except EngineError as error:
        entry["error"] = str(error)


def _summarise(entry: dict[str, Any], case: Case) -> None:
    flat = [seconds for turn in entry["seconds"] for seconds in turn]
    if not flat:
        return
    entry["step_s"] = statistics.median(flat)
    rounds = [statistics.median(turn) for turn in entry["seconds"]]
    entry["round_s_min"], entry["round_s_max"] = min(rounds), max(rounds)
    entry["tokens_per_s"] = case.tokens_per_step / entry["step_s"]
