"""Rules for ops that normalise along a dim."""

from __future__ import annotations

from onward.graph.ops import op_of
from onward.rewrite.rows.demand import (
    Answer,
    Question,
    aligned,
    are_rows,
    demand_rule,
    mixed,
    others_whole,
    over,
    united,
)
from onward.rewrite.rows.packer import pack_rule
from onward.rewrite.rows.rules.along_rows import packed_along_rows


@demand_rule(
    "LayerNormalization", "AddLayerNormalization", "RMSNorm", "AddRMSNorm", "Softmax", "LogSoftmax"
)
def along_a_dim(q: Question) -> Answer:
    """The rows that a norm reads: the same as demanded, unless it normalises over row dims."""
    demand = united(q.y, q.asked)
    axes = [d % len(q.y) for d in op_of(q.node).axes(q.node) or ()]
    mixes = any(are_rows(q.y, d) for d in axes)
    demand = over(q.y, demand, [d for d in demand.dims if d not in axes])
    if mixes:
        demand = mixed(q, demand, "it normalises over the batch")
    added = {1: demand} if q.node.op_type in ("AddLayerNormalization", "AddRMSNorm") else {}
    return others_whole(q, {0: demand, **added})


pack_rule("LayerNormalization", "RMSNorm", "Softmax", "LogSoftmax")(packed_along_rows)


@demand_rule("Rotary")
def _rotary(q: Question) -> Answer:
    """The rows that Rotary reads: the same as demanded, unless row dims are features."""
    axes = op_of(q.node).axes(q.node) or ()
    demand = over(q.y, q.demand, [d for d in q.demand.dims if d not in axes])
    if any(are_rows(q.y, d) for d in axes):
        demand = mixed(q, demand, "it transposes features and rows")
    return [aligned(demand, q.y, q.shape(i)) for i in range(3)]
