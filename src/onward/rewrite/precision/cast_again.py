"""`y = Cast(w); ...; dx = dy y'  =>  dx = dy Cast(w)'`: the backward half casts weights again, and
their low copies need not be kept from one half to the other.

A copy is as large as half the weight; the cast is one pass over memory, 1 to 2 % of a step.
"""

from __future__ import annotations

from onward.graph.graph import Graph, Role, Value, type_of
from onward.rewrite.precision.move_casts import WHOLE
from onward.rewrite.recompute import recompute


def cast_again(graph: Graph) -> int:
    """Weights that both halves read. Not where the halves run apart: there a weight may change
    before the backward runs, which eager mode allows where autocast cast it."""
    if graph.signature.apart:
        return 0
    names: set[str] = set()
    edits = 0
    for weight in graph.inputs_with(Role.PARAM):
        for node in weight.consumers():
            made = node.outputs[0]
            if node.op_type != "Cast" or not type_of(made).is_low or node.meta.get("backward"):
                continue
            shown = _shown(made)
            readers = [n for y in shown for n in y.consumers() if n.outputs[0] not in shown]
            halves = {bool(n.meta.get("backward")) for n in readers}
            if len(halves) == 2 and not graph.output_values() & shown:
                names |= {y.name for y in shown if y.name}
                edits += 1
    recompute(graph, names)
    return edits


def _shown(y: Value) -> set[Value]:
    """y, and what forward nodes show of it."""
    found, stack = {y}, [y]
    while stack:
        for node in stack.pop().consumers():
            view = node.outputs[0]
            if node.op_type in WHOLE and not node.meta.get("backward") and view not in found:
                found.add(view)
                stack.append(view)
    return found
