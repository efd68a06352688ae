"""Rules for sums and other reductions."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import Node, type_of
from onward.graph.ops.reduce import reduced_dims
from onward.graph.types import product
from onward.rewrite.rows.demand import (
    DEMAND,
    Answer,
    Question,
    are_rows,
    demand_rule,
    mixed,
    others_whole,
    over,
)
from onward.rewrite.rows.packer import Packer, pack_rule
from onward.rewrite.rows.rules.along_rows import proved, shape_of


@demand_rule(trait="reduces")
def _reduce(q: Question) -> Answer:
    demand, shape = q.demand, q.shape()
    axes = q.node.inputs[1] if len(q.node.inputs) > 1 else None
    gone = reduced_dims(axes, q.attrs, len(shape))
    mixes = any(are_rows(shape, d) for d in gone)
    if demand.rows is not None:
        keep = q.attrs.get("keepdims", 1)
        kept = [d for d in range(len(shape)) if keep or d not in gone]
        left = [d for d in demand.dims if kept[d] not in gone]
        demand = over(q.y, demand, left)
        demand = replace(demand, dims=tuple(kept[d] for d in demand.dims))
    if not mixes:
        return others_whole(q, {0: demand}) if demand.rows is not None else q.passed()
    if type_of(q.x()).rank == 0 or product(shape) == 1:
        return q.passed()
    made = mixed(q, demand, "it sums over the rows")
    if type_of(q.node.outputs[0]).rank == 0 or all(isinstance(shape[d], int) for d in gone):
        made = replace(made, weak=True)  # a loss; or a sum over heads, which looks the same
    return others_whole(q, {0: made})


@pack_rule(trait="reduces")
def _reduction(p: Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None or not proved(p, node):
        return False
    asked = DEMAND[node.op_type](Question(node, (demand,), p.known))[0]
    x = node.inputs[0]
    assert asked is not None and x is not None
    if asked.rows != demand.rows or len(asked.dims) != len(demand.dims):
        return False  # some of its row dims have size 1
    rows = p.choose(demand, shape_of(node), p.held(node))
    sizes = tuple(type_of(x).shape[d] for d in asked.dims)
    taken = p.take(x, asked.dims, asked.dims, sizes, rows)
    (made,) = p.emit(node, [taken, *node.inputs[1:]])
    p.note(node.outputs[0], made, demand.dims, rows)
    return True
