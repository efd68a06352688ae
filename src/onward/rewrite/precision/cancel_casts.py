"""`Cast(Cast(x, wider), x's type)  =>  x`; of two casts to narrower types, only the last stays.

A cast to a wider type loses nothing, so later casts may read x itself.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Value, type_of
from onward.graph.types import DType

_WIDER = {
    DType.BFLOAT16: (DType.FLOAT, DType.DOUBLE),
    DType.FLOAT16: (DType.FLOAT, DType.DOUBLE),
    DType.FLOAT: (DType.DOUBLE,),
}


def cancel_casts(graph: Graph) -> int:
    edits = 0
    for node in list(graph):
        if node.op_type != "Cast":
            continue
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        source = _before_widening(x)
        if source is x and type_of(x).dtype != type_of(y).dtype:
            continue
        if type_of(source).dtype == type_of(y).dtype:
            graph.replace(y, source)
        else:
            graph.replace(y, Builder.at(graph, node).Cast(source, to=type_of(y).dtype))
        graph.remove([node])
        edits += 1
    return edits


def _before_widening(x: Value) -> Value:
    """The value from which x was made by casts to wider types alone."""
    maker = x.producer()
    while maker is not None and maker.op_type == "Cast" and maker.inputs[0] is not None:
        inner = maker.inputs[0]
        if type_of(x).dtype not in _WIDER.get(type_of(inner).dtype, ()):
            break
        x, maker = inner, inner.producer()
    return x
