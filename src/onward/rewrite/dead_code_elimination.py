"""`y = f(x)`, y unused  =>  nothing."""

from __future__ import annotations

from onward.graph.graph import Graph


def dead_code_elimination(graph: Graph) -> int:
    """Removes nodes without readers, and constants left without readers."""
    return graph.sweep()
