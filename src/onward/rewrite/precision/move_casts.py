"""`Cast(view(x))  =>  view(Cast(x))`, for views of all of x: a weight is then cast once for all its
views, and opposite casts meet and cancel."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, attributes, type_of
from onward.rewrite.view_closure import WHOLE


def move_casts(graph: Graph) -> int:
    """Moves casts to narrower types before views. A cast to a wider type stays at its reader."""
    edits, outputs = 0, graph.output_values()
    pending = [node for node in graph if node.op_type == "Cast"]
    while pending:
        cast = pending.pop()
        shown, made = cast.inputs[0], cast.outputs[0]
        view = None if shown is None else shown.producer()
        if view is None or view.op_type not in WHOLE or made in outputs:
            continue
        x, dtype = view.inputs[0], type_of(made).dtype
        if x is None or not type_of(made).is_low or type_of(x).is_low:
            continue
        b = Builder.at(graph, view)
        inner = b.Cast(x, to=dtype)
        new = b.one(view.op_type, [inner, *view.inputs[1:]], attributes(view))
        new.meta["type"] = type_of(made)
        graph.replace(made, new)
        graph.remove([cast])
        maker = inner.producer()
        assert maker is not None
        pending.append(maker)
        edits += 1
    return edits
