"""`y = gelu(x); ...; dw = dz^T y, dx = dy gelu'(x)  =>  dw = dz^T gelu(x)`: the backward half keeps
x for the slope anyway, so it recomputes y instead of keeping it too.

These are the widest values of a layer. Recomputing y is one pass over memory, while each of its
elements costs 6 D multiplications and additions in the products around it. Relu is left out, since
its slope is read from y.
"""

from __future__ import annotations

from onward.graph.graph import Graph, Node
from onward.rewrite.recompute import recompute
from onward.rewrite.view_closure import lives_through, shown, source

ACTIVATIONS = ("BiasActivation", "GatedActivation", "Gelu")


def activation_again(graph: Graph) -> int:
    """Recomputes, in the backward half, activations that both halves read, if the backward half
    reads their inputs anyway."""
    names: set[str] = set()
    outputs = graph.output_values()
    edits = 0
    for node in graph:
        if node.op_type not in ACTIVATIONS or node.meta.get("backward"):
            continue
        values = shown(node.outputs[0])
        if lives_through(values) and not outputs & values and _kept(node):
            names |= {y.name for y in values if y.name}
            edits += 1
    if recompute(graph, names):
        _at_once(graph)
    return edits


def _at_once(graph: Graph) -> None:
    """Moves the product that reads a recomputed y right after its other operand, dz, so that y is
    freed before dy, which is as wide, is made."""
    for node in [n for n in graph if n.op_type in ACTIVATIONS and n.meta.get("again")]:
        place = {n: i for i, n in enumerate(graph)}  # recomputed, since the last move changed it
        values = shown(node.outputs[0], backward=True)
        group = {n for y in values for n in (y.producer(), *y.consumers()) if n is not None}
        operands = [x.producer() for n in group for x in n.inputs if x is not None]
        last = max((n for n in operands if n is not None and n not in group), key=place.__getitem__)
        moved = sorted(group, key=place.__getitem__)
        if all(place[last] < place[n] for n in moved):
            graph.ir.remove(moved)
            graph.ir.insert_after(last, moved)


def _kept(node: Node) -> bool:
    """Whether the backward half reads every input of the node, and its first is no parameter or
    buffer, which may change before a backward that runs as a separate call."""
    xs = [x for x in node.inputs if x is not None]
    computed = xs[:1] if node.op_type == "BiasActivation" else xs
    return all(source(x).producer() is not None for x in computed) and all(
        any(n.meta.get("backward") for n in x.consumers()) for x in xs
    )
