"""Fusions by themselves, where kernels take everything or what a test says."""

from __future__ import annotations

from collections.abc import Callable

from onward.graph.graph import Graph
from onward.rewrite import Context, Refuse, everything_taken

Apply = Callable[[Graph, Context], int]


def fused(apply: Apply, graph: Graph, refuse: Refuse = everything_taken) -> int:
    """The edits that a fusion makes."""
    return apply(graph, Context(apply.__name__, refuse))


def alone(apply: Apply) -> Callable[[Graph], int]:
    """The fusion as a pass that asks nobody."""
    return lambda graph: fused(apply, graph)


def reasons(apply: Apply, graph: Graph, refuse: Refuse = everything_taken) -> list[str]:
    """Why it leaves what it leaves; it must edit nothing."""
    context = Context(apply.__name__, refuse)
    assert apply(graph, context) == 0
    return [miss.reason for miss in context.misses]
