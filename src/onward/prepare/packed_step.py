"""Packed step: the form of a step that computes only the rows that are read, where that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Generic

import torch

from onward.environment import checking
from onward.graph.graph import Graph
from onward.plan import Plan
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import Bound, OutputRequest, PreparedBatch
from onward.prepare.row_numbers import RowNumbers, given
from onward.prepare.session import Bind, PlanCache, Session
from onward.prepare.unread_rows import Ids, Unread
from onward.rewrite import FlopCount, prune, with_rows_given

KEPT = 256  # combinations of sizes whose share is kept


class PackedStep(Generic[Bound]):
    """The packed form of a step for the requested results. forward: the packed forward. bind: makes
    the executable of a plan. running: whether the last batch ran in this form."""

    def __init__(
        self,
        graphs: Graphs,
        forward: Graph,
        session: Session,
        results: Sequence[str],
        bind: Bind[Bound],
    ) -> None:
        self._graphs, self._session, self._forward, self._bind = graphs, session, forward, bind
        padded = prune(graphs.forward, graphs.forward.signature.requested(results, None))
        self._work = FlopCount(forward), FlopCount(padded)
        self.running = False
        self._shares: dict[tuple[tuple[str, int], ...], float] = {}
        self.rows = RowNumbers(forward, graphs.compiler.here, graphs, session)
        self._plans: dict[OutputRequest, PlanCache[Bound]] = {}
        self._ids = Ids(padded, graphs, session)
        self._unread = Unread(graphs, forward, session)

    @cached_property
    def graph(self) -> Graph:
        """The whole step, with the indices of the rows as inputs."""
        return with_rows_given(self._graphs.completed(self._forward))

    @property
    def looks(self) -> list[Plan]:
        """The plans that inspect a batch before its step."""
        return [*self.rows.plans, *self._ids.plans]

    def prepare(
        self, staged: Mapping[str, torch.Tensor], dims: dict[str, int], request: OutputRequest
    ) -> PreparedBatch[Bound] | None:
        """Prepares this batch; None where it has to run padded: too few rows can be left out, or an
        unread row has an id outside its table, which the padded form refuses as eager PyTorch
        does."""
        rows, sizes = self.rows.of(staged, dims), dims
        counts = {size: len(numbers) for size, numbers in rows.items()}
        dims = dims | counts
        if not self.pays(dims) or not self._agreed(self._ids.within(staged, sizes)):
            return None
        cache = self._plans.get(request)
        if cache is None:
            budget = self._session.memory_budget
            cache = self._plans[request] = PlanCache(self._graphs.compiler, self._bind, budget)
        executable = cache.serving(self.graph, request.outputs(self.graph), dims, counts)
        inputs = {**staged, **given(self.graph, rows)}
        if checking():
            self._unread.check(staged, sizes, rows, gradients=request.update is not None)
        return PreparedBatch(executable, dims, inputs, self.share(dims), counts)

    def share(self, dims: Mapping[str, int]) -> float:
        """The packed step's FLOPs as a share of the padded step's."""
        key = tuple(dims.items())
        share = self._shares.get(key)
        if share is None:
            packed, padded = (w.flops(dims) for w in self._work)
            share = packed / padded if padded else 1.0
            if len(self._shares) >= KEPT:
                self._shares.clear()
            self._shares[key] = share
        return share

    def pays(self, dims: Mapping[str, int]) -> bool:
        """Whether to run the packed form. The form that ran last is kept unless the other is
        clearly better, so that batches near the threshold do not alternate. All ranks of a mesh run
        the same form, since each form has collectives of its own."""
        self.running = self._agreed(self.share(dims) < (0.99 if self.running else 0.95))
        return self.running

    def _agreed(self, value: bool) -> bool:
        return self._graphs.compiler.mesh.agreed(value)
