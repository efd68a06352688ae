"""Sums and their like over dims."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import Node, type_of
from onward.graph.ops.reduce import reduced_dims
from onward.rewrite.rows.demand import DEMAND, Answer, Question, demand_rule, others_whole
from onward.rewrite.rows.packer import Packer, pack_rule
from onward.rewrite.rows.rules.along_rows import proved, shape_of


@demand_rule(trait="reduces")
def _reduce(q: Question) -> Answer:
    demand, shape = q.demand, q.shape()
    axes = q.node.inputs[1] if len(q.node.inputs) > 1 else None
    gone = reduced_dims(axes, q.attrs, len(shape))
    if demand.rows is None:
        return q.passed() if gone == [len(shape) - 1] else q.refused("it sums over the rows")
    keep = q.attrs.get("keepdims", 1)
    kept = list(range(len(shape))) if keep else [d for d in range(len(shape)) if d not in gone]
    dims = tuple(kept[d] for d in demand.dims)
    if any(d in gone for d in dims):
        return q.refused("it sums over the rows")
    return others_whole(q, {0: replace(demand, dims=dims)})


@pack_rule(trait="reduces")
def _reduction(p: Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None or not proved(p, node):
        return False
    asked = DEMAND[node.op_type](Question(node, (demand,), p.known))[0]
    x = node.inputs[0]
    assert asked is not None and x is not None
    rows = p.choose(demand, shape_of(node), p.held(node))
    sizes = tuple(type_of(x).shape[d] for d in asked.dims)
    taken = p.take(x, asked.dims, asked.dims, sizes, rows)
    (made,) = p.emit(node, [taken, *node.inputs[1:]])
    p.note(node.outputs[0], made, demand.dims, rows)
    return True
