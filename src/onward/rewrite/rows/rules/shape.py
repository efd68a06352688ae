"""Rules for ops that move, split or join rows."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import Node, attributes, type_of
from onward.graph.types import Size
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import (
    Answer,
    Question,
    aligned,
    demand_rule,
    others_whole,
    regrouped,
    through_reshape,
    united,
)
from onward.rewrite.rows.packer import Packer, pack_rule
from onward.rewrite.rows.rules.along_rows import packed_along_rows, shape_of


@demand_rule(trait="reshapes")
def _reshape(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    found = through_reshape(demand, q.y, q.shape())
    return others_whole(q, {0: found})


@demand_rule("Transpose")
def _transpose(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    perm = q.attrs.get("perm") or list(reversed(range(len(q.y))))
    dims = tuple(perm[d] for d in demand.dims)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    rows = sets.permuted(demand.rows, tuple(q.y[d] for d in demand.dims), order)
    return others_whole(q, {0: replace(demand, dims=tuple(sorted(dims)), rows=rows)})


@pack_rule("Transpose", trait="reshapes")
def _moved(p: Packer, node: Node) -> bool:
    demand, x = p.demand(node), node.inputs[0]
    assert x is not None
    if demand.rows is None:
        return False
    y, shape, perm = shape_of(node), type_of(x).shape, None
    if node.op_type == "Transpose":
        perm = attributes(node).get("perm") or list(reversed(range(len(y))))
        turned = tuple(perm[d] for d in demand.dims)
        dims = turned if list(turned) == sorted(turned) else None
    else:
        dims = regrouped(demand.dims, y, shape)
    if not dims:  # all row dims have size 1 and come from the reshape
        return False
    rows = p.choose(demand, y, p.held(node))
    taken = p.take(x, dims, dims, tuple(shape[d] for d in dims), rows)
    made = p.b.transpose(taken, perm) if perm else p.reshaped(taken, dims, y, demand.dims, rows)
    p.note(node.outputs[0], made, demand.dims, rows)
    return True


@demand_rule("Expand")
def _expand(q: Question) -> Answer:
    return others_whole(q, {0: aligned(q.demand, q.y, q.shape())})


@pack_rule("Expand")
def _pack_expand(p: Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None:
        return False
    y = shape_of(node)
    rows = p.choose(demand, y, p.held(node))
    x = p.operand(node.inputs[0], y, demand.dims, rows)
    assert x is not None
    p.note(node.outputs[0], p.b.expand(x, p.packed_shape(y, demand.dims, rows)), demand.dims, rows)
    return True


@demand_rule("Split")
def _split(q: Question) -> Answer:
    dim = q.attrs.get("axis", 0) % len(q.y)
    demand = united(q.y, q.asked)
    if demand.rows is None:
        return q.passed()
    if dim in demand.dims:
        return q.refused("it splits the rows")
    return others_whole(q, {0: demand})


@demand_rule("Concat")
def _concat(q: Question) -> Answer:
    demand, dim = q.demand, q.attrs["axis"] % len(q.y)
    if demand.rows is None:
        return q.passed()
    if dim not in demand.dims:
        return [demand] * len(q.node.inputs)
    sizes, place = tuple(q.y[d] for d in demand.dims), demand.dims.index(dim)
    answer: Answer = []
    start: Size = 0
    for i in range(len(q.node.inputs)):
        length = q.shape(i)[dim]
        part = sets.ConcatPart(demand.rows, sizes, place, start, length)
        answer.append(replace(demand, rows=frozenset({part})))
        start = start + length
    return answer


pack_rule("Split", "Concat")(packed_along_rows)
