"""Casts into ops that read or write the other type themselves; the same bits, a pass over memory
less.

    AddLayerNormalization(Cast(x), ...)  =>  AddLayerNormalization(x, ...)
    Cast(AddLayerNormalization(...).y)   =>  AddLayerNormalization(..., y_type).y
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.graph.types import DType

# by op: the operand that may be low where it stands
_READS = {"AddLayerNormalization": 0, "AddRMSNorm": 0}
# by op: the output that may be low by the attribute `y_type`
_WRITES = {"AddLayerNormalization": 0, "AddRMSNorm": 0}


def fold_casts(graph: Graph) -> int:
    edits, outputs = 0, graph.output_values()
    for node in list(graph):
        edits += _into_reader(node)
        edits += _into_writer(graph, node, outputs)
    return edits


def _into_reader(node: Node) -> int:
    i = _READS.get(node.op_type)
    x = None if i is None else node.inputs[i]
    source = None if x is None else _widened(x)
    if i is None or source is None:
        return 0
    node.replace_input_with(i, source)
    return 1


def _widened(x: Value) -> Value | None:
    """The low value that x is cast from, to f32; None where it is not."""
    maker = x.producer()
    if maker is None or maker.op_type != "Cast" or maker.inputs[0] is None:
        return None
    inner = maker.inputs[0]
    return inner if type_of(inner).is_low and type_of(x).dtype == DType.FLOAT else None


def _into_writer(graph: Graph, node: Node, outputs: set[Value]) -> int:
    """Where all that read the output cast it to one low type."""
    i = _WRITES.get(node.op_type)
    if i is None or "y_type" in node.attributes:
        return 0
    y = node.outputs[i]
    casts = list(dict.fromkeys(use.node for use in y.uses()))
    lows = {type_of(c.outputs[0]).dtype for c in casts if c.op_type == "Cast"}
    whole = bool(casts) and all(c.op_type == "Cast" for c in casts) and y not in outputs
    if not whole or len(lows) != 1 or type_of(y).dtype != DType.FLOAT:
        return 0
    (low,) = lows
    if not type_of(casts[0].outputs[0]).is_low:
        return 0
    b = Builder.at(graph, node)
    made = b.node(node.op_type, list(node.inputs), attributes(node) | {"y_type": int(low)})
    assert isinstance(made, tuple)
    for old, new in zip(node.outputs, made, strict=True):
        new.meta["type"] = new.meta["type"].with_shape(type_of(old).shape)
        if old is not y:
            graph.replace(old, new)
    for cast in casts:
        graph.replace(cast.outputs[0], made[i])
    graph.remove([*casts, node])
    return 1
