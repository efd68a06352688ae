"""`y = f(x)`, y unused  =>  nothing."""

from __future__ import annotations

from onward.graph.graph import Graph


def dead_code_elimination(graph: Graph) -> int:
    """Removes nodes nobody reads, and constants left without a reader."""
    return graph.sweep()
