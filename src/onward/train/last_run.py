"""The last run: the training step that ran last, and what its compilation had to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.execute import Executable
from onward.journal import Journal
from onward.plan import Plan
from onward.rewrite import summary
from onward.train.batch import Batch
from onward.train.prepared_batch import OutputRequest, PreparedBatch
from onward.train.prepared_step import PreparedStep
from onward.train.report import Report
from onward.train.without_gradient import WithoutGradient


def report_of(
    journal: Journal,
    notes: Sequence[str],
    prepared: PreparedBatch[Any],
    still: WithoutGradient,
) -> Report:
    """Of a batch that has run, and of the compilation before it. still: what got no gradient."""
    plan: Plan = prepared.executable.plan
    return Report(
        compile_seconds=dict(journal.seconds),
        passes=[r.numbers for r in journal.reports],
        near_misses=summary(m for r in journal.reports for m in r.misses),
        predicted_peak_bytes=plan.peak,
        launches=len(plan.launches),
        rows=prepared.rows,
        no_gradient=list(still.unreached),
        frozen=list(still.frozen),
        notes=list(notes),
    )


@dataclass(frozen=True)
class LastRun:
    """step: whose request ran on the batch. inputs: by graph input, with which it ran."""

    step: PreparedStep[Executable]
    batch: Batch
    request: OutputRequest
    prepared: PreparedBatch[Executable]
    inputs: Mapping[str, Any]

    @property
    def plan(self) -> Plan:
        """What ran."""
        return self.prepared.executable.plan

    def report(self) -> Report:
        """A new report, the caller's own."""
        journal, captured = self.step.graphs.compiler.journal, self.step.captured
        still = WithoutGradient.of(captured, captured.reached)
        return report_of(journal, captured.notes, self.prepared, still)

    def profile(self) -> dict[str, float]:
        """Seconds per op of one more run, which leaves everything as it was."""
        return self.prepared.executable.profile_by_op(self.inputs, self.prepared.dims)
