"""Ops that compute each element from those at its place."""

from __future__ import annotations

from onward.graph.graph import Node, Value, array_of, attributes, type_of
from onward.graph.ops import op_of
from onward.rewrite.rows import sets
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


@demand_rule(trait="elementwise")
def _reads(q: Question) -> Answer:
    special = {"Mul": _masked_product, "Where": _where}.get(q.node.op_type)
    if special is not None and (answer := special(q)) is not None:
        return answer
    return [aligned(q.demand, q.y, q.shape(i)) for i in range(len(q.node.inputs))]


def _row_mask(q: Question, i: int) -> tuple[int, ...] | None:
    """The dims of the output along which the known input `i` varies, where they are rows."""
    if not q.is_known(i) or array_of(q.x(i)) is not None:
        return None
    shift, shape = len(q.y) - len(q.shape(i)), q.shape(i)
    if any(size != 1 and size != q.y[d + shift] for d, size in enumerate(shape)):
        return None
    dims = tuple(d + shift for d, size in enumerate(shape) if size != 1)
    return dims if dims and len(q.y) - 1 not in dims else None


def _masked_product(q: Question) -> Answer | None:
    """`x * m`: where the batch alone makes m 0, nothing of x is left (x taken to be finite)."""
    for x, m in ((0, 1), (1, 0)):
        dims = _row_mask(q, m)
        if dims is not None and q.shape(x) == q.y:
            demand = met(q.y, q.demand, dims, sets.test(q.x(m)))
            return others_whole(q, {x: demand})
    return None


def _where(q: Question) -> Answer | None:
    """Each side only where the batch's condition chooses it."""
    dims = _row_mask(q, 0)
    if dims is None:
        return None
    answer: dict[int, Demand] = {}
    for i, chosen in ((1, sets.test(q.x(0))), (2, sets.test(q.x(0), equal=True))):
        demand = met(q.y, q.demand, dims, chosen)
        answer[i] = aligned(demand, q.y, q.shape(i))
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
    """With the logical indices of dim 0, into which all row dims go for the time of the op."""
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
