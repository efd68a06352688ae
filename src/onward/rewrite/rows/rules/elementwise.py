"""Rules for elementwise ops."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.ops import op_of
from onward.rewrite.rows.demand import (
    Answer,
    Demand,
    Question,
    aligned,
    demand_rule,
    met,
    others_whole,
)
from onward.rewrite.rows.packer import Packer, Rows, pack_rule
from onward.rewrite.rows.rules.along_rows import shape_of
from onward.rewrite.rows.zeros import Zeros


@demand_rule(trait="elementwise")
def _reads(q: Question) -> Answer:
    special = {"Mul": _product, "Where": _where, "Add": _hidden}.get(q.node.op_type)
    if special is not None and (answer := special(q)) is not None:
        return answer
    return [aligned(q.demand, q.y, q.shape(i)) for i in range(len(q.node.inputs))]


def _rows_of(q: Question, i: int, rows: Demand | None) -> Demand | None:
    """Rows of input `i` as rows of the output; None where they are features."""
    if rows is None:
        return None
    shift, shape, last = len(q.y) - len(q.shape(i)), q.shape(i), len(q.y) - 1
    dims = tuple(d + shift for d in rows.dims)
    if any(shape[d - shift] != q.y[d] for d in dims):
        return None
    if last in dims and isinstance(q.y[last], int):
        return None
    return replace(rows, dims=dims)


def _product(q: Question) -> Answer | None:
    """The rows that `x * m` reads: where m is 0, x is not read (and is assumed to be finite).

    Only one of the two computed factors is reduced, since each is 0 only where it is itself
    computed.
    """
    zeros = Zeros(q.known)
    order = sorted(((0, 1), (1, 0)), key=lambda p: not q.is_known(p[1]))
    for x, m in order:
        if q.shape(x) != q.y or q.is_known(x):
            continue
        rows = _rows_of(q, m, zeros.nonzero(q.x(m)))
        if rows is not None:
            other = aligned(q.demand, q.y, q.shape(m))
            return others_whole(q, {x: met(q.y, q.demand, rows), m: other})
    return None


def _hidden(q: Question) -> Answer | None:
    """The rows that scores plus a mask, before a softmax, read: not where the mask hides them.
    There `x + k` is k in floating point, and the gradient is 0, unless the sum is an output."""
    if q.node.outputs[0] in q.ends:
        return None
    zeros = Zeros(q.known)
    for x, k in ((0, 1), (1, 0)):
        if q.is_known(k) and not q.is_known(x) and q.shape(x) == q.y:
            rows = _rows_of(q, k, zeros.weighed(q.node, k))
            if rows is not None:
                return others_whole(q, {x: met(q.y, q.demand, rows)})
    return None


def _where(q: Question) -> Answer | None:
    """The rows that a Where reads: of each side those that the batch's condition selects."""
    zeros, answer = Zeros(q.known), dict[int, Demand]()
    for i in (1, 2):
        rows = _rows_of(q, 0, zeros.truth(q.x(0), equal=i == 2))
        if rows is None:
            return None
        answer[i] = aligned(met(q.y, q.demand, rows), q.y, q.shape(i))
    return others_whole(q, answer)


@demand_rule("Dropout")
def _dropout(q: Question) -> Answer:
    return others_whole(q, {0: q.demand})


@pack_rule("AddLayerNormalization", "AddRMSNorm", "Dropout", "Rotary", trait="elementwise")
def _pack(p: Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None:
        return False
    drops = op_of(node).random and _draws(node)
    if drops and demand.dims != tuple(range(len(demand.dims))):
        return False
    y = shape_of(node)
    rows = p.choose(demand, y, p.held(node))
    inputs = [p.operand(x, y, demand.dims, rows) for x in node.inputs]
    made = _dropping(p, node, inputs, demand.dims, rows) if drops else p.emit(node, inputs)
    for value, result in zip(node.outputs, made, strict=True):
        p.note(value, result, demand.dims, rows)
    return True


def _draws(node: Node) -> bool:
    return attributes(node).get("ratio", 0.0) > 0.0


def _dropping(
    p: Packer, node: Node, inputs: list[Value | None], dims: tuple[int, ...], rows: Rows
) -> list[Value]:
    """Writes an op with dropout on packed rows, all row dims merged into dim 0, with their logical
    indices."""
    y, lead = shape_of(node), len(dims) - 1
    sizes = tuple(y[d] for d in dims)
    at = {"Dropout": 3, "AddLayerNormalization": 6, "AddRMSNorm": 5}[node.op_type]
    tensors = 1 if node.op_type == "Dropout" else 2
    inputs = [*inputs, *[None] * (at - len(inputs)), p.coordinates(rows, sizes)]
    for i in range(tensors):
        x = inputs[i]
        assert x is not None
        inputs[i] = p.b.reshape(x, type_of(x).shape[lead:])
    return [p.b.reshape(v, (*[1] * lead, *type_of(v).shape)) for v in p.emit(node, inputs)]
