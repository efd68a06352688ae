"""Rules of grouped products, as in a mixture of experts: along the groups, so that each rank has
the weights of some experts and works on the rows that are routed to them (expert parallelism,
GShard, arXiv 2006.16668); or within each group, by columns and by rows of its matrix.

Rows lie group by group, so that those of a rank's groups are one run of rows; which one depends on
the batch. They stay in their places: what a rank has in the place of others is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, ROWS, Sharding, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, type_of

GROUPS = split(0)


def _rows_of(call: ShardedCall) -> Sharding:
    """The rows of a call's groups, by the value that says where groups end."""
    ends = call.node.inputs[2]
    assert ends is not None
    return Sharding(terms=ROWS, owner=ends.name or "")


@way_rule("GroupedMatMul")
def _matmul(call: ShardedCall) -> Iterator[Way]:
    rows = _rows_of(call)
    if GROUPS.fits(call.type(1), call.ranks):
        yield Way((rows, GROUPS, REPLICATED), (rows,), _on_own_groups)
    for groups in call.groups:
        yield Way((REPLICATED, split(2, groups), REPLICATED), (split(1, groups),))
        yield Way((split(1, groups), split(1, groups), REPLICATED), (PARTIAL,))
    if call.given[0] == PARTIAL:
        yield Way((PARTIAL, REPLICATED, REPLICATED), (PARTIAL,))


@way_rule("GroupedOuter")
def _outer(call: ShardedCall) -> Iterator[Way]:
    rows = _rows_of(call)
    if GROUPS.fits(call.results[0], call.ranks):
        yield Way((rows, rows, REPLICATED), (GROUPS,), _on_own_groups)
    for groups in call.groups:
        yield Way((split(1, groups), REPLICATED, REPLICATED), (split(1, groups),))
        yield Way((REPLICATED, split(1, groups), REPLICATED), (split(2, groups),))
    for i in (0, 1):
        if call.given[i] == PARTIAL:
            yield Way(call.inputs({i: PARTIAL}), (PARTIAL,))


def _on_own_groups(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    """The op on the rank's groups, whose rows are moved to the front, and back behind it."""
    x, other, ends = inputs
    assert x is not None and other is not None and ends is not None
    [rows], [groups] = [type_of(x).shape[:1], type_of(ends).shape]
    assert isinstance(groups, int)
    each, zero = groups // place.ranks, b.const(np.zeros(1, np.int64))
    first = b.slice(ends, 0, place.at * each - 1, place.at * each) if place.at else zero
    own = b.slice(ends, 0, place.at * each, (place.at + 1) * each)
    number, size = b.arange(rows), b.size(rows)
    name = node.inputs[2].name if node.inputs[2] is not None else ""
    key = ("own rows", name)
    if key not in place.shared:
        last = b.slice(ends, 0, (place.at + 1) * each - 1, (place.at + 1) * each)
        if place.at == place.ranks - 1:  # rows of no group are its own as well
            last = size
        place.shared[key] = b.And(b.GreaterOrEqual(number, first), b.Less(number, last))
    moved, local = b.Mod(b.Add(number, first), size), b.Sub(own, first)
    if node.op_type == "GroupedOuter":  # sums over rows, of which others may be infinite
        seen = b.unsqueeze(place.shared[key], [1])
        pair = [b.Where(seen, y, b.scalar(0.0, type_of(y).dtype)) for y in (x, other)]
        return same_op(b, node, [*(b.Gather(y, moved, axis=0) for y in pair), local])
    [y] = same_op(b, node, [b.Gather(x, moved, axis=0), other, local])
    back = b.Mod(b.Add(b.Sub(number, first), size), size)
    return [b.Gather(y, back, axis=0)]


# ---- what is computed row by row


def _taken(call: ShardedCall) -> Sharding | None:
    """The rows that inputs have, where they are the same."""
    found = {s for s in call.given if s is not None and s.terms == ROWS}
    return found.pop() if len(found) == 1 else None


@way_rule(trait="elementwise")
def _elements(call: ShardedCall) -> Iterator[Way]:
    rows, y = _taken(call), call.results[0]
    if rows is None or any(t.shape != y.shape for t in call.results):
        return
    present = [i for i in range(call.number) if call.present(i)]
    found = {i: rows for i in present if call.type(i).rank == y.rank and call.shape(i)[0] != 1}
    if any(s == rows and i not in found for i, s in enumerate(call.given)):
        return  # rows of an operand that is shared by all rows of the result
    yield Way(call.inputs(found), tuple(rows for _ in call.results))


@way_rule("Split", "ReduceSum", "Softmax", "Reshape", "Unsqueeze", "Squeeze")
def _of_each_row(call: ShardedCall) -> Iterator[Way]:
    """What leaves the rows in their places."""
    rows, x = _taken(call), call.type()
    if rows is None or call.given[0] != rows:
        return
    along = {int(call.attrs.get("axis", 0 if call.node.op_type == "Split" else -1)) % x.rank}
    if call.node.op_type == "ReduceSum":
        dims = call.known(1) if call.present(1) else range(x.rank)
        along = {int(d) % x.rank for d in dims or () if isinstance(d, int)} or {0}
    elif call.node.op_type not in ("Split", "Softmax"):
        along = set()
    if 0 in along or any(not t.rank or t.shape[0] != x.shape[0] for t in call.results):
        return
    yield Way(call.inputs({0: rows}), tuple(rows for _ in call.results))


@way_rule("Concat")
def _beside(call: ShardedCall) -> Iterator[Way]:
    rows = _taken(call)
    if rows is not None and call.attrs["axis"] % call.type().rank:
        yield Way(tuple(rows for _ in range(call.number)), (rows,))
