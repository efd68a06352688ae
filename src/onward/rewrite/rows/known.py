"""Values that depend on the batch alone, and so are known before any parameter is read."""

from __future__ import annotations

from onward.graph.graph import Graph, Node, Role, Value


def batch_values(graph: Graph) -> frozenset[Value]:
    """The values that depend on the batch and the module's buffers, but not on parameters."""
    known: set[Value] = {*graph.inputs_with(Role.BATCH, Role.BUFFER)}
    known.update(graph.ir.initializers.values())
    for node in graph:
        if all(v in known for v in node.inputs if v is not None):
            known.update(node.outputs)
    return frozenset(known)


def batch_first(graph: Graph, known: frozenset[Value]) -> list[Node]:
    """Moves the nodes that depend on the batch alone before all others; returns the others."""
    nodes = list(graph)
    first = [n for n in nodes if n.outputs[0] in known]
    rest = [n for n in nodes if n.outputs[0] not in known]
    graph.ir.remove(nodes)
    graph.ir.extend([*first, *rest])
    return rest
