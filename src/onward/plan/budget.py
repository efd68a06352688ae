"""Budget: the search for a plan within a memory budget, by proposals of values to recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onward.graph.graph import Graph
from onward.kernels import Target
from onward.memory_amounts import LAYERS, memory_amount
from onward.plan.plan import Plan
from onward.plan.recompute import Search, between


@dataclass(frozen=True)
class Judged:
    """A proposal that was applied and planned. what: the report of the caller that applied it."""

    plan: Plan
    graph: Graph
    what: Any


class Budget:
    """Searches for a plan of a specialized graph within a memory budget, given the plan without
    recomputation.

    amount: the largest peak in bytes, or a fraction of what recomputation can save (0.0: the
    smallest peak, 1.0: no recomputation), or LAYERS: what layers do not pass on is computed again,
    unless that makes the peak larger. chosen: the plan that fits; None where no recomputation
    is needed.
    """

    def __init__(self, graph: Graph, plan: Plan, amount: int | float | str, target: Target) -> None:
        self.chosen: Judged | None = None
        self._graph, self._plan, self._target = graph, plan, target
        self._by_layers = amount == LAYERS
        known = 0 if self._by_layers else memory_amount(amount)
        assert known is not None, f"no budget: {amount}"
        self._amount: int | float = known
        self._search: Search | None = None
        self._judged: Judged | None = None

    def proposals(self) -> Iterator[tuple[Graph, set[str]]]:
        """Yields a graph and the values to recompute in it. The caller applies the proposal, plans
        the graph and calls `judge` before it takes the next. Raises OnwardError where no plan
        fits."""
        if self._by_layers:
            yield from self._of_layers()
            return
        if isinstance(self._amount, int):
            limit, least = self._amount, None
        else:
            if self._amount == 1.0 or not any(x.backward for x in self._plan.launches):
                return  # recomputation saves nothing, as in an evaluation, which has no backward
            tried: list[Judged] = []
            for proposal in self._searched(0):
                yield proposal
                tried.append(self._last())
            least = min(tried, key=lambda judged: judged.plan.peak, default=None)
            smallest = self._plan.peak if least is None else least.plan.peak
            limit = between(smallest, self._plan.peak, self._amount)
        if self._plan.peak <= limit:
            return
        for proposal in self._searched(limit):
            yield proposal
            if self._last().plan.peak <= limit:
                self.chosen = self._last()
                return
        if least is None:
            assert self._search is not None
            raise self._search.error()
        self.chosen = least

    def _of_layers(self) -> Iterator[tuple[Graph, set[str]]]:
        search = self._search = Search(self._graph, 0, self._plan, self._target)
        values = search.layers() if any(x.backward for x in self._plan.launches) else set()
        if values:
            yield search.graph.clone(), values
            if self._last().plan.peak < self._plan.peak:
                self.chosen = self._last()

    def judge(self, plan: Plan, graph: Graph, what: Any) -> None:
        """Receives the plan of the last proposal, applied to its graph."""
        assert self._search is not None
        self._search.judge(plan)
        self._judged = Judged(plan, graph, what)

    def _searched(self, limit: int) -> Iterator[tuple[Graph, set[str]]]:
        self._search = Search(self._graph, limit, self._plan, self._target)
        for values in self._search.proposals():
            yield self._search.graph.clone(), values

    def _last(self) -> Judged:
        assert self._judged is not None, "a proposal was not judged"
        return self._judged
