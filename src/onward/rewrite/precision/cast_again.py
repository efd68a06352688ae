"""`y = Cast(w); ...; dx = dy y'  =>  dx = dy Cast(w)'`: the backward half casts weights again, so
that their low-precision copies need not be kept between the halves.

A copy takes half as many bytes as the weight; the cast is one pass over memory, 1 to 2 % of a step.
"""

from __future__ import annotations

from onward.graph.graph import Graph, Role, type_of
from onward.rewrite.recompute import recompute
from onward.rewrite.view_closure import lives_through, shown


def cast_again(graph: Graph) -> int:
    """Casts weights that both halves read once more in the backward half. Does nothing where the
    halves run as separate calls: a weight may change before the backward runs, and must not affect
    it then, as with eager's autocast."""
    if graph.signature.split_halves:
        return 0
    names: set[str] = set()
    edits = 0
    for weight in graph.inputs_with(Role.PARAM):
        for node in weight.consumers():
            made = node.outputs[0]
            if node.op_type != "Cast" or not type_of(made).is_low or node.meta.get("backward"):
                continue
            values = shown(made)
            if lives_through(values) and not graph.output_values() & values:
                names |= {y.name for y in values if y.name}
                edits += 1
    recompute(graph, names)
    return edits
