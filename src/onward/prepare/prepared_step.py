"""Prepared step: a captured call, its graphs, and the plans made of them.

A step exists in two forms. The padded one computes every row; it is planned once for each shape of
batch. The packed one computes only the rows that are read (`packed_step.py`); it is planned for the
most rows seen so far, and each batch runs at its own counts. Each batch decides which form runs.
"""

from __future__ import annotations

from typing import Any, Generic

import torch

from onward.errors import CaptureError, OnwardError
from onward.plan import Plan
from onward.prepare.batch import Batch
from onward.prepare.graphs import Graphs
from onward.prepare.packed_step import PackedStep
from onward.prepare.prepared_batch import Bound, OutputRequest, PreparedBatch
from onward.prepare.session import Bind, Session

KEPT = 64  # plans of one graph that stay bound, one per shape and request


class PreparedStep(Generic[Bound]):
    """A captured call that runs batches of one kind. kind: their structure and dtypes. bind: makes
    the executable of a plan."""

    def __init__(
        self, kind: tuple[Any, ...], graphs: Graphs, session: Session, bind: Bind[Bound]
    ) -> None:
        self.kind, self.graphs, self.session = kind, graphs, session
        self.captured = graphs.captured
        self.padded: dict[Any, Bound] = {}  # by the batch's signature, and the request
        self._bind = bind
        self._dims: dict[Any, dict[str, int]] = {}  # by the signatures seen
        self._packed: dict[tuple[str, ...], PackedStep[Bound] | None] = {}

    def fits(self, batch: Batch) -> bool:
        """Whether the graph was captured from a batch like this one."""
        if batch.signature in self._dims:
            return self.captured.suits(batch.tensors)
        if self.kind != batch.kind:
            return False
        dims = self.captured.dims(batch.tensors)
        if dims is not None:
            self._dims[batch.signature] = dims
        return dims is not None

    def prepare(self, batch: Batch, request: OutputRequest) -> PreparedBatch[Bound]:
        """Prepares a batch in its padded or packed form. Raises OnwardError for a result that the
        model lacks."""
        dims, staged = self.sizes(batch), self.staged(batch)
        packed = self.packed(request.results)
        if packed is not None:
            found = packed.prepare(staged, dims, request)
            if found is not None:
                return found
        staged, dims = self.graphs.in_micro_batches(staged, dims)
        key = (batch.signature, request)
        executable = self.padded.pop(key, None)
        if executable is None:
            graph, compiler = self.graphs.step, self.graphs.compiler
            outputs, budget = request.outputs(graph), self.session.memory_budget
            plan = compiler.plan(graph, outputs, dims, budget)
            executable = self._bind(plan)
        self.padded[key] = executable  # now the most recently used
        while len(self.padded) > KEPT:
            del self.padded[next(iter(self.padded))]
        return PreparedBatch(executable, dims, staged)

    def packed(self, results: tuple[str, ...]) -> PackedStep[Bound] | None:
        """The packed form for these results; None where they need every row."""
        if results not in self._packed:
            self._check(results)
            forward = self.graphs.forward
            packed = self.graphs.packed(forward.signature.requested(results, None))
            self._packed[results] = (
                None
                if packed is None
                else PackedStep(self.graphs, packed, self.session, results, self._bind)
            )
        return self._packed[results]

    @property
    def looks(self) -> list[Plan]:
        """The plans that inspect batches before their steps."""
        packed = (step for step in self._packed.values() if step is not None)
        return [plan for step in packed for plan in step.looks]

    def sizes(self, batch: Batch) -> dict[str, int]:
        """The batch's sizes by symbol. Raises CaptureError for a batch of another kind."""
        if not self.fits(batch):
            raise CaptureError(
                "the captured graph does not fit its own batch; fix: report "
                "this as a bug, with the model"
            )
        return self._dims[batch.signature]

    def staged(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The batch's tensors by graph input."""
        leaves = self.captured.leaves
        return {leaves[i]: t for i, t in enumerate(batch.tensors)}

    def _check(self, results: tuple[str, ...]) -> None:
        have = list(self.graphs.forward.signature.results)
        unknown = next((n for n in results if n not in (*have, "loss")), None)
        if unknown is not None:
            named = ", ".join(have) or "only its loss"
            raise OnwardError(
                f"fetch names the output '{unknown}', which the model does not "
                f"have; fix: one of {named}"
            )
