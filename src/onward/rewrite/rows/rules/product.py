"""Products of matrices."""

from __future__ import annotations

from onward.rewrite.rows.demand import Answer, Question, aligned, demand_rule, others_whole
from onward.rewrite.rows.packer import pack_rule
from onward.rewrite.rows.rules.along_rows import packed_along_rows


@demand_rule("Gemm")
def _gemm(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    if demand.dims != (0,) or q.attrs.get("transA"):
        return q.refused("its rows are mixed")
    answer = {0: demand}
    if len(q.node.inputs) > 2 and q.node.inputs[2] is not None:
        answer[2] = aligned(demand, q.y, q.shape(2))
    return others_whole(q, answer)


@demand_rule("MatMul")
def _matmul(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    if len(q.shape(1)) != 2:
        return q.refused("both factors have rows")
    if len(q.y) - 1 in demand.dims:
        return q.refused("its rows are mixed")
    return others_whole(q, {0: demand})


pack_rule("Gemm", "MatMul")(packed_along_rows)
