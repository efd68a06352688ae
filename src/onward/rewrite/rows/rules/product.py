"""Rules for matrix products."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import Node, role_of, type_of
from onward.graph.types import Shape
from onward.rewrite.rows.demand import (
    Answer,
    Demand,
    Question,
    aligned,
    all_of,
    demand_rule,
    every_row,
    met,
    mixed,
    others_whole,
    over,
)
from onward.rewrite.rows.packer import Packer, pack_rule
from onward.rewrite.rows.rules.along_rows import packed_along_rows
from onward.rewrite.rows.zeros import Zeros, weights_hint


@demand_rule("Gemm")
def _gemm(q: Question) -> Answer:
    demand = q.demand
    if q.attrs.get("transA"):
        return [mixed(q, all_of(), "it sums over the rows") for _ in q.node.inputs]
    rows = over(q.y, demand, (0,)) if demand.rows is not None else q.passed()[0]
    assert rows is not None
    answer = {0: rows, 1: every_row(q, "it meets every row of its other factor")}
    if len(q.node.inputs) > 2 and q.node.inputs[2] is not None:
        answer[2] = aligned(demand, q.y, q.shape(2))
    return others_whole(q, answer)


@demand_rule("MatMul")
def _matmul(q: Question) -> Answer:
    """The rows that a MatMul reads: rows of one factor that meet only zeros of the other are not
    read."""
    demand, ranks = q.demand, [len(q.shape(i)) for i in (0, 1)]
    if ranks[1] == 2 and role_of(q.x(1)) is not None:
        if demand.rows is None:
            return q.passed()
        return others_whole(
            q, {0: over(q.y, demand, [d for d in demand.dims if d != ranks[0] - 1])}
        )
    if min(ranks) < 2:
        return q.refused("its rows are mixed")
    zeros = Zeros(q.known)
    nonzero = [None if q.is_known(1 - i) else zeros.nonzero(q.x(i)) for i in (0, 1)]
    answer = {i: _factor(q, i) for i in (0, 1)}
    # reduce only one computed factor: each is 0 only where it is itself computed
    for x, m in sorted(((0, 1), (1, 0)), key=lambda p: (not q.is_known(p[1]), p)):
        rows = nonzero[m]
        if rows is not None and (met_ones := _met(q, x, m, rows)) is not None:
            answer[x] = met(q.shape(x), answer[x], met_ones)
            break
    return others_whole(q, answer)


def _factor(q: Question, i: int) -> Demand:
    """The demand for a factor that meets no zeros: all of its summed dim."""
    shape, y, demand = q.shape(i), q.y, q.demand
    summed = len(shape) - 1 if i == 0 else len(shape) - 2
    kept = len(y) - 2 if i == 0 else len(y) - 1
    shift = len(y) - len(shape)
    mixes = not isinstance(shape[summed], int)  # a fixed size is taken for features or heads
    reason = "it sums over the rows"
    if mixes and (hint := weights_hint(q.x(1 - i))):
        reason = f"{reason}; {hint}"
    if demand.rows is None:
        found = q.passed()[i]
        assert found is not None
        return mixed(q, found, reason) if mixes else found
    dims = [d for d in demand.dims if d == kept or (d < len(y) - 2 and d >= shift)]
    dims = [d for d in dims if shape[_place(d, y, shape, i)] == y[d]]
    found = over(y, demand, dims)
    found = replace(found, dims=tuple(_place(d, y, shape, i) for d in found.dims))
    return mixed(q, found, reason) if mixes else found


def _place(d: int, y: Shape, shape: Shape, i: int) -> int:
    """The dim of a factor that corresponds to this dim of the result."""
    return d - (len(y) - len(shape))


def _met(q: Question, x: int, m: int, rows: Demand) -> Demand | None:
    """The demand for the rows of factor `x` that meet nonzero rows of factor `m`."""
    own, other = q.shape(x), q.shape(m)
    summed = len(other) - 1 if m == 0 else len(other) - 2
    if summed not in rows.dims:
        return None
    place = len(own) - 2 if x == 1 else len(own) - 1
    dims: dict[int, int] = {}  # dims of m -> dims of x
    for d in rows.dims:
        if d == summed:
            dims[d] = place
        elif d < len(other) - 2 and (to := d + len(own) - len(other)) >= 0 and own[to] == other[d]:
            dims[d] = to
    kept = sorted(dims)
    if [dims[d] for d in kept] != sorted(dims.values()):
        return None
    found = over(other, rows, kept)
    return replace(found, dims=tuple(dims[d] for d in kept))


@pack_rule("MatMul")
def _pack_matmul(p: Packer, node: Node) -> bool:
    """Packs a product of rows by a matrix. A product that sums over rows gets whole inputs."""
    matrix = node.inputs[1]
    if matrix is None or type_of(matrix).rank != 2 or role_of(matrix) is None:
        return False
    return packed_along_rows(p, node)


pack_rule("Gemm")(packed_along_rows)
