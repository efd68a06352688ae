"""The flow, on one page. The only module that puts every stage in order.

    capture -> rewrite(forward) -> row demand -> differentiate -> update -> rewrite(step)
            -> specialize(dims) -> plan -> execute
A stage receives a value and returns one, by one verb of `Compiler`:
    captured   = compiler.capture(model, args, kwargs)     Captured
    forward    = compiler.forward(captured)                Graph; packed: compiler.pack(forward, ..)
    step       = compiler.step(forward, recipe)            Graph; or compiler.halves(forward, ..)
    plan       = compiler.plan(step, outputs, dims)        Plan
    executable = compiler.bind(plan, memory, owned)        Executable
Seconds, reports and dumps stand in the compiler's journal; captures and graphs are on disk
(capture_cache.py, graph_cache.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from onward import capture_cache, rewrite
from onward.capture import Captured, CapturedModule, capture, evaluation
from onward.differentiate import Recipe, add_updates, vjp
from onward.environment import environment
from onward.execute import Executable, ExecutableHalves, Memory
from onward.extend import load_plugins
from onward.graph.graph import Graph
from onward.graph.spec import Stage
from onward.graph_cache import kept
from onward.journal import Journal
from onward.kernels import EagerPart, Target
from onward.plan import Budget, Fusible, Plan, make_plan, specialize


@kept("forward", "pack", "step", "halves")  # read where a run before has made the same
class Compiler:
    """The stages, for one target and without some passes. policy: of casts, where precision is
    mixed."""

    def __init__(
        self,
        target: Target,
        disable: Iterable[str] = (),
        journal: Journal | None = None,
        policy: rewrite.Policy | None = None,
    ) -> None:
        load_plugins()
        self.target, self.disable = target, rewrite.switched_off(disable)
        self.policy = policy
        self._fusible = Fusible(target)
        self.journal = Journal() if journal is None else journal

    def capture(self, *args: Any, **kwargs: Any) -> CapturedModule:
        """The call of a module as a graph (`onward.capture.capture`)."""
        captured = capture_cache.kept(self.journal, capture, *args, **kwargs)
        self.journal.note("capture", captured.graph, Stage.CAPTURED)
        return captured

    def evaluation(self, trained: CapturedModule) -> CapturedModule | None:
        """The evaluation of a call that was captured in training; None where it may be more than
        the same without dropout (`onward.capture.evaluation`)."""
        with self.journal.timed("capture"):
            captured = evaluation(trained)
        if captured is not None:
            self.journal.note("capture", captured.graph, Stage.CAPTURED)
        return captured

    def quiet(self) -> Compiler:
        """A compiler alike, for graphs that only look at a batch and are no stage of a step."""
        return Compiler(self.target, self.disable, Journal(quiet=True), self.policy)

    def forward(self, captured: Captured) -> Graph:
        """The captured graph, rewritten, and in the precision that the policy says."""
        policy = rewrite.policy_for(captured.graph, self.policy)
        graph = self._rewrite(captured.graph, rewrite.FORWARD, "forward")
        if policy is None:
            return graph
        return self._rewrite(graph, rewrite.in_precision(policy), "precision")

    def pack(
        self, forward: Graph, outputs: Sequence[str], reads: dict[str, str] | None = None
    ) -> Graph | None:
        """The forward for the rows that these outputs read; None where that is every row. `reads`:
        see `rewrite.row_demand`."""
        if "row_demand" in self.disable:
            return None
        with self.journal.timed("rewrite rows"):
            graph = forward.clone()
            edit = partial(rewrite.row_demand, graph, outputs, reads=reads)
            report = rewrite.measured("row_demand", graph, edit, self._fusible)
        self.journal.reports.append(report)
        if report.edits:
            self.journal.note("forward-row_demand", graph, Stage.PACKED)
        return graph if report.edits else None

    def gradients(self, forward: Graph, wrt: Sequence[str], zeros: Collection[str]) -> Graph:
        """Forward and gradients, rewritten; the graph that other engines are compared on."""
        return self._rewrite(self._differentiate(forward, wrt, zeros), rewrite.STEP, "gradients")

    def halves(self, forward: Graph, ends: Sequence[str], wrt: Sequence[str]) -> Graph:
        """Forward and gradients by these inputs, for cotangents of the outputs `ends` that come
        after the forward has run. An input that they do not reach has a gradient of zeros."""
        graph = self._differentiate(forward, wrt, wrt, ends)
        graph.signature = graph.signature.but(apart=True)
        return self._rewrite(graph, rewrite.halves(), "halves")

    def step(self, forward: Graph, recipe: Recipe) -> Graph:
        """The whole training step as one graph."""
        graph = self._differentiate(forward, recipe.parameters, recipe.parameters)
        with self.journal.timed("updates"):
            graph = add_updates(graph, recipe)
        self.journal.note("updates", graph)
        return self._rewrite(graph, rewrite.STEP, "step")

    def plan(
        self,
        graph: Graph,
        outputs: Iterable[str],
        dims: Mapping[str, int],
        budget: int | float | str | None = None,
        open: Collection[str] = (),
        label: str = "",
    ) -> Plan:
        """The plan that computes these outputs of `graph` at these sizes, within a budget of bytes.
        open: sizes that may be smaller when it runs. label: before the names of dumps."""
        with self.journal.timed("specialize"):
            bound = specialize(graph, dims, open, outputs)
        self.journal.note(f"{label}specialize", bound, Stage.SPECIALIZED)
        with self.journal.timed("plan"):
            plan = make_plan(bound, dict(dims), target=self.target)
        if budget is not None:
            with self.journal.timed("recompute"):
                plan = self._fit(bound, plan, budget)
        self.journal.note_plan(f"{label}plan", plan)
        return plan

    def bind(
        self, plan: Plan, memory: Memory, owned: Mapping[str, Any], parts: Sequence[EagerPart] = ()
    ) -> Executable:
        """The plan in memory. owned: the tensors that belong to others, by graph input. parts: what
        its regions run."""
        with self.journal.timed("execute: memory and binding"):
            executable = Executable(plan, memory, owned, parts)
            executable.bind()
        return executable

    def bind_halves(
        self, plan: Plan, memory: Memory, owned: Mapping[str, Any], parts: Sequence[EagerPart] = ()
    ) -> ExecutableHalves:
        """Binds a plan that runs in two halves; each run binds it to a block of memory."""
        return ExecutableHalves(plan, memory, owned, parts)

    def _differentiate(
        self, graph: Graph, wrt: Sequence[str], zeros: Collection[str], ends: Sequence[str] = ()
    ) -> Graph:
        with self.journal.timed("differentiate"):
            graph = vjp(graph, ends or graph.signature.ends, wrt, zeros)
        self.journal.note("differentiate", graph)
        return graph

    def _rewrite(self, graph: Graph, passes: Sequence[rewrite.AnyPass], stage: str) -> Graph:
        after, check = partial(self.journal.note_pass, stage), environment().check
        with self.journal.timed(f"rewrite {stage}"):
            graph, reports = rewrite.run(graph, passes, self.disable, after, check, self._fusible)
        self.journal.reports += reports
        self.journal.ends(Stage(stage), graph)
        return graph

    def _fit(self, bound: Graph, plan: Plan, amount: int | float | str) -> Plan:
        """Plans again with ever more values recomputed until it fits: the one feedback."""
        budget = Budget(bound, plan, amount, self.target)
        for graph, values in budget.proposals():
            again = partial(rewrite.recompute, graph, values)
            report = rewrite.measured("recompute", graph, lambda _, again=again: again())
            budget.judge(make_plan(graph, plan.dims, target=self.target), graph, report)
        if budget.chosen is None:
            return plan
        self.journal.reports.append(budget.chosen.what)
        self.journal.note("recompute", budget.chosen.graph, Stage.SPECIALIZED)
        return budget.chosen.plan
