"""Rules for ops that keep the row dims in place, and tests that such rules share."""

from __future__ import annotations

from onward.graph.graph import Node, Value, type_of
from onward.graph.types import Shape
from onward.rewrite.rows.demand import DEMAND, Question
from onward.rewrite.rows.packer import Packer


def shape_of(node: Node) -> Shape:
    return type_of(node.outputs[0]).shape


def packed_along_rows(p: Packer, node: Node) -> bool:
    """Packs an op that keeps the row dims in place and needs nothing but its rows."""
    demand = p.demand(node)
    if demand.rows is None or not proved(p, node):
        return False
    y = shape_of(node)
    rows = p.choose(demand, y, p.held(node))
    tensors = {"Gemm": (0, 2), "Concat": range(len(node.inputs))}.get(node.op_type, (0,))
    sizes = tuple(y[d] for d in demand.dims)
    inputs: list[Value | None] = list(node.inputs)
    for i in tensors:
        x = inputs[i] if i < len(inputs) else None
        if x is None:
            continue
        shape = type_of(x).shape
        if len(shape) == len(y):
            present = [d for d in demand.dims if shape[d] == sizes[demand.dims.index(d)]]
            inputs[i] = p.take(x, present, demand.dims, sizes, rows) if present else p.whole(x)
        else:
            inputs[i] = p.operand(x, y, demand.dims, rows)
    inputs = [None if x is None else p.whole(x) for x in inputs]
    for value, result in zip(node.outputs, p.emit(node, inputs), strict=True):
        p.note(value, result, demand.dims, rows)
    return True


def proved(p: Packer, node: Node) -> bool:
    """Whether the op's demand rule passes the demanded rows to an input unchanged."""
    asked = tuple(p.asked.get(y) for y in node.outputs)
    answer = DEMAND[node.op_type](Question(node, asked, p.known))
    demand = p.demand(node)
    if node.op_type == "Concat":
        return demand.rows is not None and demand in answer  # else the op combines rows
    return answer[0] is not None and answer[0].rows is not None and answer[0].rows == demand.rows
