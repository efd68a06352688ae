"""Rules of ops that read and write by index. A table whose rows are split is read by numbers of
its own rows, with zeros in the place of others: terms of the result (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from onward.distribute.tensor.numbers_in_range import within
from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, type_of
from onward.graph.types import DType, Size


def own_numbers(
    b: Builder, ids: Value, rows: Size, place: RankPlace, wraps: bool = True
) -> tuple[Value, Value]:
    """The numbers of the rank's own rows that ids are, 0 for those of other ranks, and whether each
    is its own. rows: that a rank has. wraps: whether -1 is the last row. A run raises IndexError
    where an id is that of no rank's row."""
    zero = np.array(0, type_of(ids).dtype.numpy())

    def number(size: Size) -> Value | np.ndarray:
        if isinstance(size, int):
            return np.array(size, zero.dtype)
        return b.cast(b.squeeze(b.size(size), [0]), type_of(ids).dtype)

    ids = within(b, ids, number(rows * place.ranks), "index", place.shared, wraps=int(wraps))
    if wraps:
        past = b.Add(ids, number(rows * place.ranks))
        ids = b.Where(b.Less(ids, zero), past, ids)
    local = b.Sub(ids, number(rows * place.at))
    own = b.And(b.GreaterOrEqual(local, zero), b.Less(local, number(rows)))
    return b.Where(own, local, zero), own


@way_rule("Gather", "Embedding")
def _gather(call: ShardedCall) -> Iterator[Way]:
    x, ids = call.type(0), call.type(1)
    axis = call.attrs.get("axis", 0) % x.rank
    for found in call.splits(x):
        dim = found.dim
        assert dim is not None
        if dim != axis:
            at = dim if dim < axis else dim - 1 + ids.rank
            yield Way((found, REPLICATED), (split(at, found.groups),))
        elif found.groups == 1 and x.is_floating:
            program = partial(_own_rows, axis=axis)
            yield Way((found, REPLICATED), (PARTIAL,), program)
    for found in call.splits(ids):
        assert found.dim is not None
        yield Way((REPLICATED, found), (split(axis + found.dim, found.groups),))
    if call.given[0] == PARTIAL:
        yield Way((PARTIAL, REPLICATED), (PARTIAL,))


def _own_rows(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace, axis: int
) -> Sequence[Value]:
    x, ids = inputs
    assert x is not None and ids is not None
    rows, behind = type_of(x).shape[axis], type_of(x).rank - axis - 1
    local, own = own_numbers(b, ids, rows, place, wraps=node.op_type == "Gather")
    [y] = same_op(b, node, [x, local])
    if behind:
        own = b.reshape(own, (*type_of(own).shape, *[1] * behind))
    return [b.Where(own, y, b.scalar(0.0, type_of(y).dtype))]


@way_rule("ScatterND")
def _scatter(call: ShardedCall) -> Iterator[Way]:
    x, ids, updates = (call.type(i) for i in range(3))
    depth = ids.shape[-1]
    adds = call.attrs.get("reduction", "none") == "add"
    if not isinstance(depth, int):
        return
    for found in call.splits(x):
        dim = found.dim
        assert dim is not None
        if dim >= depth:
            of_updates = split(dim - depth + ids.rank - 1, found.groups)
            if of_updates.fits(updates, call.ranks):
                yield Way((found, REPLICATED, of_updates), (found,))
        elif dim == 0 and depth == 1 and found.groups == 1 and adds:
            yield Way((found, REPLICATED, REPLICATED), (found,), _into_own_rows)
    for found in call.splits(ids) if adds else ():  # each rank adds what it has
        if found.dim != ids.rank - 1:
            yield Way((PARTIAL, found, found), (PARTIAL,))
    if adds and (call.given[0] == PARTIAL or call.given[2] == PARTIAL):
        yield Way((PARTIAL, REPLICATED, PARTIAL), (PARTIAL,))


def _into_own_rows(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    """Adds what other ranks have rows for to no row: zeros to the first."""
    x, ids, updates = inputs
    assert x is not None and ids is not None and updates is not None
    rows = type_of(x).shape[0]
    assert type_of(ids).dtype == DType.INT64
    local, own = own_numbers(b, ids, rows, place)
    own = b.reshape(own, (*type_of(ids).shape[:-1], *[1] * (type_of(x).rank - 1)))
    kept = b.Where(own, updates, b.scalar(0.0, type_of(updates).dtype))
    return same_op(b, node, [x, local, kept])


__all__ = ["own_numbers"]
