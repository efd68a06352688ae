"""Applies a list of passes, and reports name, edits and seconds of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from onward.graph.check import check
from onward.graph.graph import Graph
from onward.rewrite.context import Context, NearMiss, Refuse, everything_taken
from onward.rewrite.dead_code_elimination import dead_code_elimination


@dataclass(frozen=True)
class Pass:
    """A rewrite of a graph, by name. exact: it changes no bit of any result."""

    apply: Callable[[Graph], int]
    exact: bool = True

    @property
    def name(self) -> str:
        return self.apply.__name__

    def run(self, graph: Graph, context: Context) -> int:
        return self.apply(graph)


@dataclass(frozen=True)
class FusionPass:
    """A rewrite that writes own ops where kernels accept them, as the context tells."""

    apply: Callable[[Graph, Context], int]
    exact: bool = True

    @property
    def name(self) -> str:
        return self.apply.__name__

    def run(self, graph: Graph, context: Context) -> int:
        return self.apply(graph, context)


AnyPass: TypeAlias = Pass | FusionPass


@dataclass(frozen=True)
class PassReport:
    """The report of one pass: edits made, seconds taken, nodes left, and near misses."""

    name: str
    edits: int
    seconds: float
    nodes: int
    misses: tuple[NearMiss, ...] = ()

    @property
    def numbers(self) -> dict[str, Any]:
        """Name, edits, seconds and nodes as a dict."""
        return {k: v for k, v in vars(self).items() if k != "misses"}


def measured(
    name: str, graph: Graph, edit: Callable[[Context], int], refuse: Refuse = everything_taken
) -> PassReport:
    """Runs an edit of `graph` with a new context, and reports it."""
    context, start = Context(name, refuse), time.perf_counter()
    edits = edit(context)
    seconds = time.perf_counter() - start
    return PassReport(name, edits, seconds, len(graph), tuple(context.misses))


def run(
    graph: Graph,
    passes: Sequence[AnyPass],
    disable: Iterable[str] = (),
    after: Callable[[Graph, PassReport], None] | None = None,
    verify: bool = False,
    refuse: Refuse = everything_taken,
) -> tuple[Graph, list[PassReport]]:
    """Applies passes to a copy of the graph, and returns it with their reports. after: called with
    graph and report after each pass. verify: checks the graph after each pass. refuse: says which
    calls no kernel accepts, so that fusions leave them."""
    off = set(disable)
    graph = graph.clone()
    reports: list[PassReport] = []
    for item in tuple(passes):  # a copy: another thread may register a pass meanwhile
        if item.name in off:
            continue
        reports.append(measured(item.name, graph, partial(item.run, graph), refuse))
        if verify:
            check(graph)
        if after is not None:
            after(graph, reports[-1])
    return graph, reports


def prune(graph: Graph, outputs: Iterable[str]) -> Graph:
    """A copy of the graph that computes only these outputs."""
    graph = graph.clone()
    keep_outputs(graph, outputs)
    return graph


def keep_outputs(graph: Graph, outputs: Iterable[str]) -> None:
    """Removes the graph's other outputs, and all nodes that only they need."""
    kept = set(outputs)
    graph.outputs = {name: v for name, v in graph.outputs.items() if name in kept}
    graph.state = {name: v for name, v in graph.state.items() if name in kept}
    dead_code_elimination(graph)
    inputs = {v.name or "" for v in graph.inputs}
    graph.signature = graph.signature.within(inputs, graph.outputs)
