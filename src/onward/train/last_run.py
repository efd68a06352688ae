"""LastRun: the training step that ran last, with its compilation report, plan and profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onward.execute import Executable
from onward.explanation.nonfinite import NonfiniteOrigin, nonfinite_origin
from onward.plan import Plan
from onward.prepare.batch import Batch
from onward.prepare.prepared_batch import OutputRequest, PreparedBatch
from onward.prepare.prepared_step import PreparedStep
from onward.prepare.report import Report, report_of
from onward.prepare.without_gradient import WithoutGradient


@dataclass(frozen=True)
class LastRun:
    """A training step that has run. inputs: the values that it ran with, by graph input. own_step:
    why the optimizer made the update itself; None where the graph did."""

    step: PreparedStep[Executable]
    batch: Batch
    request: OutputRequest
    prepared: PreparedBatch[Executable]
    inputs: Mapping[str, Any]
    own_step: str | None = None

    @property
    def plan(self) -> Plan:
        """The plan that ran."""
        return self.prepared.executable.plan

    def labels(self) -> torch.Tensor:
        """The labels f64[] that the window had counted after this run."""
        return self.prepared.executable.output(self.prepared.signature.windowed["labels"])

    def report(self) -> Report:
        """Makes a new report, which the caller may change."""
        journal, captured = self.step.graphs.compiler.journal, self.step.captured
        still = WithoutGradient.of(captured, captured.reached)
        report = report_of(journal, captured.notes, self.prepared, still)
        report["own_step"] = self.own_step
        return report

    def profile(self) -> dict[str, float]:
        """Seconds per op of one more run; leaves weights and state as they were."""
        return self.prepared.executable.profile_by_op(self.inputs, self.prepared.dims)

    def nonfinite_origin(self) -> NonfiniteOrigin | None:
        """Where infinite and NaN gradients come from, found by one more run that writes no weights;
        None where all gradients are finite."""
        return nonfinite_origin(self.prepared.executable, self.inputs, self.prepared.dims)
