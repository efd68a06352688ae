"""`y = f(x)`, y unused  =>  nothing."""

from __future__ import annotations

from onward.graph.graph import Graph


def dead_code_elimination(graph: Graph) -> int:
    """Removes nodes nobody reads, and constants left without a reader."""
    kept = graph.output_values()
    edits = 0
    for node in reversed(list(graph)):
        if any(v in kept or v.uses() for v in node.outputs):
            continue
        graph.remove([node])
        edits += 1
    for name, value in list(graph.ir.initializers.items()):
        if value not in kept and not value.uses():
            del graph.ir.initializers[name]
    return edits
