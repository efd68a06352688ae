"""The last run: the training step that ran last, and what its compilation had to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.journal import Journal
from onward.plan import Plan
from onward.rewrite import summary
from onward.train.prepared_batch import PreparedBatch
from onward.train.report import Report


@dataclass(frozen=True)
class LastRun:
    """notes: of the capture. inputs: by graph input, with which the batch ran."""

    journal: Journal
    notes: Sequence[str]
    prepared: PreparedBatch
    inputs: Mapping[str, Any]

    @property
    def plan(self) -> Plan:
        """What ran."""
        return self.prepared.executable.plan

    def report(self) -> Report:
        """A new report, the caller's own."""
        return Report(
            compile_seconds=dict(self.journal.seconds),
            passes=[r.numbers for r in self.journal.reports],
            near_misses=summary(m for r in self.journal.reports for m in r.misses),
            predicted_peak_bytes=self.plan.peak,
            launches=len(self.plan.launches),
            rows=self.prepared.rows,
            notes=list(self.notes),
        )

    def profile(self) -> dict[str, float]:
        """Seconds per op of one more run, which leaves everything as it was."""
        return self.prepared.executable.profile_by_op(self.inputs, self.prepared.dims)
