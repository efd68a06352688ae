"""The flow, on one page. The only module that knows every stage.

    capture -> rewrite(forward) -> differentiate -> rewrite(step) -> bind(dims) -> plan -> execute

Each line of `Compiled` is one arrow; between two lines the graph can be dumped (`ONWARD_DUMP`)
and checked (`ONWARD_CHECK`).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from onward.capture import Captured, capture
from onward.config import CaptureError, OnwardError, check_names, environment, memory_amount
from onward.differentiate import UpdateGroup, add_updates, vjp
from onward.execute import Executable, Memory
from onward.graph.check import check
from onward.graph.file import save
from onward.graph.graph import Graph
from onward.graph.text import graph_text
from onward.kernels import host
from onward.plan import Fusible, Plan, Search, between, bind, make_plan
from onward.rewrite import FORWARD, STEP, Context, Report, prune, recompute, row_demand, run

log = logging.getLogger("onward")
SWITCHES = tuple(dict.fromkeys([*(p.name for p in (*FORWARD, *STEP)), "row_demand"]))


def switched_off(disable: Iterable[str]) -> set[str]:
    """The passes to leave out, by option and by environment. Raises OnwardError for a name that
    none has."""
    names = environment().disable
    check_names("disable", "pass", disable, SWITCHES)
    check_names("ONWARD_DISABLE", "pass", names, SWITCHES)
    return {*disable, *names}


class Compiled:
    """Graphs of one captured call, from forward to step, and the plans made of them."""

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: tuple[Any, ...] = (),
        loss_fn: Callable[..., torch.Tensor] | None = None,
        disable: Iterable[str] = (),
        keep_stages: bool = False,
    ) -> None:
        self.stages: list[tuple[str, Graph]] | None = [] if keep_stages else None
        self.seconds: dict[str, float] = {}
        self.reports: list[Report] = []
        self.disable = switched_off(disable)
        self._dumped = 0
        self.target = host(next((p.device.type for p in model.parameters()), "cpu"))
        self._fusible = Fusible(self.target)
        with self._timed("capture"):
            self.captured: Captured = capture(model, args, kwargs, target, loss_fn)
        self._note("capture", self.captured.graph)
        with self._timed("rewrite forward"):
            self.forward = self._rewrite(self.captured.graph, FORWARD, "forward")

    def differentiated(self, wrt: Sequence[str], forward: Graph | None = None) -> Graph:
        """Forward and gradients, rewritten; the graph an independent engine is compared on."""
        graph = self._gradients(forward or self.forward, wrt)
        with self._timed("rewrite step"):
            return self._rewrite(graph, STEP, "gradients")

    def narrow(self, outputs: Sequence[str]) -> Graph | None:
        """The forward for the rows that these outputs need; None where that is every row."""
        if "row_demand" in self.disable:
            return None
        with self._timed("rewrite rows"):
            graph, start = self.forward.clone(), time.perf_counter()
            context = Context("row_demand", self._fusible)
            edits = row_demand(graph, outputs, context)
            seconds = time.perf_counter() - start
        misses = tuple(context.misses)
        self.reports.append(Report("row_demand", edits, seconds, len(graph), misses))
        if not edits:
            return None
        self._note("forward-row_demand", graph)
        return graph

    def reads(self, outputs: Sequence[str]) -> tuple[Graph, dict[str, str]]:
        """The narrow forward with NaN for rows that it leaves out, and what its further outputs
        show where NaN arrives (`rewrite.row_demand`)."""
        graph, reads = self.forward.clone(), {}
        row_demand(graph, outputs, Context("row_demand", self._fusible), reads)
        return graph, reads

    def step(
        self,
        wrt: Sequence[str],
        groups: Sequence[UpdateGroup],
        max_grad_norm: float | None,
        accumulate: bool,
        forward: Graph | None = None,
        skip_nonfinite: bool = False,
    ) -> Graph:
        """The whole training step as one graph. `forward`: a narrow one, else `self.forward`."""
        graph = self._gradients(forward or self.forward, wrt)
        with self._timed("updates"):
            graph = add_updates(graph, groups, max_grad_norm, accumulate, skip_nonfinite)
        self._note("updates", graph)
        with self._timed("rewrite step"):
            return self._rewrite(graph, STEP, "step")

    def plan(
        self,
        graph: Graph,
        outputs: Iterable[str],
        dims: Mapping[str, int],
        memory_budget: int | float | str | None = None,
        open: Collection[str] = (),
        label: str = "",
    ) -> Plan:
        """The plan that computes these outputs of `graph` at these sizes, within the budget.

        open: sizes that may be smaller when it runs. label: before the names of what is dumped.
        """
        with self._timed("bind"):
            bound = bind(prune(graph, outputs), dims, open)
        self._note(f"{label}bind", bound)
        with self._timed("plan"):
            plan = make_plan(bound, dict(dims), target=self.target)
        if memory_budget is not None:
            with self._timed("recompute"):
                plan = self._fit(bound, plan, memory_budget)
        folder = environment().dump
        if folder is not None:
            (folder / f"{self._dumped:02d}-{label}plan.txt").write_text(f"{plan}\n")
            self._dumped += 1
        return plan

    def executable(
        self, plan: Plan, memory: Memory, owned: Mapping[str, torch.Tensor]
    ) -> Executable:
        with self._timed("execute: memory and binding"):
            executable = Executable(plan, memory, owned)
            executable.bind()
        return executable

    def _fit(self, bound: Graph, plan: Plan, memory_budget: int | float | str) -> Plan:
        """Plans again with ever more values recomputed, until the peak is within the budget."""
        limit, found = memory_amount(memory_budget), None
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
        self.reports.append(report)
        self._note("recompute", graph)
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

    # ---- between the stages

    def _gradients(self, forward: Graph, wrt: Sequence[str]) -> Graph:
        with self._timed("differentiate"):
            graph = vjp(forward, ["loss"], wrt, zeros=self.captured.reached)
        self._note("differentiate", graph)
        return graph

    def _rewrite(self, graph: Graph, passes: Any, stage: str) -> Graph:
        graph, reports = run(
            graph,
            passes,
            self.disable,
            after=lambda g, name: self._note(f"{stage}-{name}", g),
            verify=environment().check,
            refuse=self._fusible,
        )
        self.reports += reports
        return graph

    def _note(self, stage: str, graph: Graph) -> None:
        if environment().check:
            check(graph)
        if self.stages is not None:
            self.stages.append((stage, graph.clone()))
        folder = environment().dump
        if folder is not None:
            dump(graph, folder, f"{self._dumped:02d}-{stage.replace(' ', '-')}")
            self._dumped += 1

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        log.debug("%s ...", stage, extra={"stage": stage})
        start = time.perf_counter()
        try:
            with _uncollected():
                yield
        except OnwardError:
            raise
        except (ValueError, TypeError, LookupError, AssertionError, NotImplementedError) as error:
            raise CaptureError(f"the model cannot be compiled, at '{stage}': {error}") from error
        seconds = time.perf_counter() - start
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        log.info("%s: %.3f s", stage, seconds, extra={"stage": stage, "seconds": seconds})


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cyclic garbage collector. A stage makes many objects that stay, and a full
    collection looks at all of torch's as well: two were 0.6 s of the 4 s of BERT-base."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def dump(graph: Graph, folder: Path, stem: str) -> None:
    """Writes `stem.txt` and `stem.onnx`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.txt").write_text(graph_text(graph))
    save(graph, folder / f"{stem}.onnx")
