"""One run of the padded benchmark: what is measured, with what effort, written where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from suite import cases
from suite.batches import shares
from suite.cases import Case
from suite.engines import Engine
from suite.losses import compare
from suite.measurement import Effort, measure
from suite.progress import Clock, say
from suite.remote import processes
from suite.report import Writer
from suite.row_engines import WITHOUT
from suite.row_report import table
from suite.workloads import make_batches

# Tolerance of the mean loss by model. The two towers have few pairs and a low temperature, so that
# dropout moves their loss more.
LEVEL = {case.model: 0.02 if case.model == "bert_padded" else 0.08 for case in cases.PADDED}


@dataclass
class Run:
    """One run of the benchmark: what is measured with what effort, and where it is written.

    rounds, steps: 0 for as many as each part has by default.
    """

    engines: Mapping[str, Engine]
    report: dict[str, Any]
    writer: Writer
    clock: Clock
    quick: bool = False
    rounds: int = 0
    steps: int = 0
    threads: int = 0
    cases: Sequence[Case] = field(default_factory=tuple)

    def chosen(self, *names: str) -> dict[str, Engine]:
        """The engines of this run among `names`; a name that the run lacks is left out."""
        return {name: self.engines[name] for name in names if name in self.engines}

    def level(self, case: Case) -> float:
        """The tolerance of a case's mean loss; few steps of a tiny model jump more."""
        return LEVEL[case.model] * (3 if self.quick else 1)

    def write(self) -> Path:
        """Write what is known by now."""
        alone = self.report["paired"] and not self.report["cases"]
        name = f"{self.writer.name}-paired" if alone else self.writer.name
        return replace(self.writer, name=name)(self.report, table(self.report))

    def skip(self, what: str, why: str = "out of time") -> None:
        """Say that something was not measured."""
        self.report["skipped"].append(f"{what} ({why})")
        say(f"{what}: not run, {why}")


def measured(run: Run, case: Case, chosen: Mapping[str, Engine], effort: Effort) -> dict[str, Any]:
    """One case, with its shares; Onward's losses beside those without the pass."""
    with processes(chosen, "cpu", run.threads) as remotes:
        found = measure(case, remotes, effort, run.clock.left)
    found["settings"] = {"steps": effort.steps, "rounds": found["rounds"], "warmup": effort.warmup}
    found["rows"] = shares(make_batches(case, effort.batches))
    entries = found["engines"]
    for entry in entries.values():
        flat = [seconds for turn in entry["seconds"] for seconds in turn]
        if flat:
            entry["mean_step_s"] = statistics.fmean(flat)
    if WITHOUT in entries and "onward" in entries:
        compare(entries["onward"], entries[WITHOUT])
    return found
