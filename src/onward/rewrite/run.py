"""Applies a list of passes: named, counted, timed, each can be switched off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from onward.graph.check import check
from onward.graph.graph import Graph
from onward.rewrite.dead import dead


@dataclass(frozen=True)
class Pass:
    """One rewrite. `exact` passes change no bit of any result.

    needs: the onward ops it writes; it is left out on a device where one of them has no kernel.
    """

    apply: Callable[[Graph], int]
    exact: bool = True
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.apply.__name__


@dataclass(frozen=True)
class Report:
    """What one pass did: edits made, seconds taken, nodes left."""

    name: str
    edits: int
    seconds: float
    nodes: int


def run(
    graph: Graph,
    passes: Sequence[Pass],
    disable: Iterable[str] = (),
    after: Callable[[Graph, str], None] | None = None,
    verify: bool = False,
) -> tuple[Graph, list[Report]]:
    """A rewritten copy of the graph. `after(graph, name)` sees it after each pass."""
    off = set(disable)
    graph = graph.clone()
    reports: list[Report] = []
    for item in passes:
        if item.name in off:
            continue
        start = time.perf_counter()
        edits = item.apply(graph)
        reports.append(Report(item.name, edits, time.perf_counter() - start, len(graph)))
        if verify:
            check(graph)
        if after is not None:
            after(graph, item.name)
    return graph, reports


def prune(graph: Graph, outputs: Iterable[str]) -> Graph:
    """A copy that computes only these outputs."""
    graph = graph.clone()
    kept = set(outputs)
    graph.outputs = {name: v for name, v in graph.outputs.items() if name in kept}
    graph.state = {name: v for name, v in graph.state.items() if name in kept}
    dead(graph)
    inputs = {v.name or "" for v in graph.inputs}
    graph.signature = graph.signature.within(inputs, graph.outputs)
    return graph
