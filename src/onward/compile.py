"""The road, on one page. The only module that knows every stage.

    capture -> rewrite(forward) -> row demand -> differentiate -> update -> rewrite(step)
            -> bind(dims) -> plan -> execute

A stage receives a value and returns one, by one verb of `Compiler`:

    captured   = compiler.capture(model, args, kwargs)     Captured
    graphs     = compiler.graphs(captured, recipe)         Graph: forward, packed, step; made on ask
    plan       = compiler.plan(graph, outputs, dims)       Plan
    executable = compiler.bind(plan, memory, owned)        Executable

What happened on the way stands in the compiler's journal.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from onward.capture import Captured, CapturedModule, capture
from onward.config import check_names, environment, memory_amount
from onward.differentiate import Recipe, add_updates, vjp
from onward.execute import Executable, Memory
from onward.graph.graph import Graph
from onward.journal import Journal
from onward.kernels import Target
from onward.plan import Fusible, Plan, Search, between, bind, make_plan
from onward.rewrite import (
    FORWARD,
    STEP,
    AnyPass,
    Context,
    Report,
    prune,
    recompute,
    row_demand,
    run,
)  # fmt: skip

SWITCHES = tuple(dict.fromkeys([*(p.name for p in (*FORWARD, *STEP)), "row_demand"]))


def switched_off(disable: Iterable[str]) -> set[str]:
    """The passes to leave out, by option and by environment. Raises OnwardError for a name that
    none has."""
    names = environment().disable
    check_names("disable", "pass", disable, SWITCHES)
    check_names("ONWARD_DISABLE", "pass", names, SWITCHES)
    return {*disable, *names}


class Compiler:
    """The stages, for one target and without some passes."""

    def __init__(
        self, target: Target, disable: Iterable[str] = (), journal: Journal | None = None
    ) -> None:
        self.target, self.disable = target, switched_off(disable)
        self._fusible = Fusible(target)
        self.journal = Journal() if journal is None else journal

    def capture(self, *args: Any, **kwargs: Any) -> CapturedModule:
        """The call of a module as a graph (`onward.capture.capture`)."""
        with self.journal.timed("capture"):
            captured = capture(*args, **kwargs)
        self.journal.note("capture", captured.graph)
        return captured

    def graphs(self, captured: Captured, recipe: Recipe | None = None) -> Graphs:
        """Its programs; a recipe makes them those of a training step."""
        return Graphs(self, captured, recipe)

    def quiet(self) -> Compiler:
        """The same for graphs that only look at a batch, and are no stage of a step."""
        return Compiler(self.target, self.disable, Journal(quiet=True))

    def forward(self, captured: Captured) -> Graph:
        """The captured graph, rewritten."""
        with self.journal.timed("rewrite forward"):
            return self._rewrite(captured.graph, FORWARD, "forward")

    def pack(
        self, forward: Graph, outputs: Sequence[str], reads: dict[str, str] | None = None
    ) -> Graph | None:
        """The forward for the rows that these outputs read; None where that is every row. `reads`:
        see `rewrite.row_demand`."""
        if "row_demand" in self.disable:
            return None
        with self.journal.timed("rewrite rows"):
            graph, start = forward.clone(), time.perf_counter()
            context = Context("row_demand", self._fusible)
            edits = row_demand(graph, outputs, context, reads)
            seconds, misses = time.perf_counter() - start, tuple(context.misses)
        self.journal.reports.append(Report("row_demand", edits, seconds, len(graph), misses))
        if not edits:
            return None
        self.journal.note("forward-row_demand", graph)
        return graph

    def gradients(self, forward: Graph, wrt: Sequence[str], zeros: Collection[str]) -> Graph:
        """Forward and gradients, rewritten; the graph that other engines are compared on."""
        graph = self._differentiate(forward, wrt, zeros)
        with self.journal.timed("rewrite step"):
            return self._rewrite(graph, STEP, "gradients")

    def step(self, forward: Graph, recipe: Recipe) -> Graph:
        """The whole training step as one graph."""
        graph = self._differentiate(forward, recipe.parameters, recipe.parameters)
        with self.journal.timed("updates"):
            graph = add_updates(graph, recipe)
        self.journal.note("updates", graph)
        with self.journal.timed("rewrite step"):
            return self._rewrite(graph, STEP, "step")

    def plan(
        self,
        graph: Graph,
        outputs: Iterable[str],
        dims: Mapping[str, int],
        budget: int | float | str | None = None,
        open: Collection[str] = (),
        label: str = "",
    ) -> Plan:
        """The plan that computes these outputs of `graph` at these sizes, within the budget of
        memory. open: sizes that may be smaller when it runs. label: before the names of dumps."""
        with self.journal.timed("bind"):
            bound = bind(prune(graph, outputs), dims, open)
        self.journal.note(f"{label}bind", bound)
        with self.journal.timed("plan"):
            plan = make_plan(bound, dict(dims), target=self.target)
        if budget is not None:
            with self.journal.timed("recompute"):
                plan = self._fit(bound, plan, budget)
        self.journal.note_plan(f"{label}plan", plan)
        return plan

    def bind(self, plan: Plan, memory: Memory, owned: Mapping[str, Any]) -> Executable:
        """The plan in memory. owned: the tensors that belong to others, by graph input."""
        with self.journal.timed("execute: memory and binding"):
            executable = Executable(plan, memory, owned)
            executable.bind()
        return executable

    def _differentiate(self, forward: Graph, wrt: Sequence[str], zeros: Collection[str]) -> Graph:
        assert forward.signature.loss is not None, "a forward without a loss has no gradients"
        with self.journal.timed("differentiate"):
            graph = vjp(forward, [forward.signature.loss], wrt, zeros)
        self.journal.note("differentiate", graph)
        return graph

    def _rewrite(self, graph: Graph, passes: Sequence[AnyPass], stage: str) -> Graph:
        graph, reports = run(
            graph,
            passes,
            self.disable,
            after=lambda g, name: self.journal.note(f"{stage}-{name}", g),
            verify=environment().check,
            refuse=self._fusible,
        )
        self.journal.reports += reports
        return graph

    # ---- the one feedback: a plan proposes what to compute again, and is made once more

    def _fit(self, bound: Graph, plan: Plan, budget: int | float | str) -> Plan:
        """Plans again with ever more values recomputed, until the peak is within the budget."""
        limit, found = memory_amount(budget), None
        if isinstance(limit, float):
            if limit == 1.0 or not any(launch.backward for launch in plan.launches):
                return plan  # nothing to spare, or nothing kept: evaluation has no backward
            tried = self._recomputed(Search(bound, 0, plan, self.target))
            found = min(tried, key=lambda t: t[0].peak, default=None)
            limit = between(plan.peak if found is None else found[0].peak, plan.peak, limit)
        assert isinstance(limit, int)
        if plan.peak <= limit:
            return plan
        search = Search(bound, limit, plan, self.target)
        found = next((t for t in self._recomputed(search) if t[0].peak <= limit), found)
        if found is None:
            raise search.error()
        plan, graph, report = found
        self.journal.reports.append(report)
        self.journal.note("recompute", graph)
        return plan

    def _recomputed(self, search: Search) -> Iterator[tuple[Plan, Graph, Report]]:
        """The plan of each proposal, its graph, and what the pass did."""
        for values in search.proposals():
            start, graph = time.perf_counter(), search.graph.clone()
            edits = recompute(graph, values)
            report = Report("recompute", edits, time.perf_counter() - start, len(graph))
            plan = make_plan(graph, search.unconstrained.dims, target=self.target)
            search.judge(plan)
            yield plan, graph, report


class Graphs:
    """The programs of one captured call, each made when it is first asked for."""

    def __init__(self, compiler: Compiler, captured: Captured, recipe: Recipe | None) -> None:
        self.compiler, self.captured, self.recipe = compiler, captured, recipe
        self._packed: dict[tuple[str, ...], Graph | None] = {}

    @cached_property
    def forward(self) -> Graph:
        """On every row."""
        return self.compiler.forward(self.captured)

    def packed(self, outputs: Sequence[str]) -> Graph | None:
        """The forward on the rows that these outputs read; None where that is every row."""
        key = tuple(outputs)
        if key not in self._packed:
            self._packed[key] = self.compiler.pack(self.forward, key)
        return self._packed[key]

    @cached_property
    def step(self) -> Graph:
        """What a batch runs, on every row: forward, gradients and updates as the recipe says."""
        return self.completed(self.forward)

    def completed(self, forward: Graph) -> Graph:
        """The same of another form of the forward."""
        return forward if self.recipe is None else self.compiler.step(forward, self.recipe)
