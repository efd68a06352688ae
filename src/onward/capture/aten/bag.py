"""`torch.nn.EmbeddingBag`: sums, means and maxima over bags of rows of a table."""

from __future__ import annotations

import math

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.indexing import index64, refuse_table
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Size, Type

_MODES = ("sum", "mean", "max")


def _embedding_bag(
    c: AtenCall, weight: Value, ids: Value, offsets: Value, by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample: Value | None = None, last: bool = False,
    padding: int | None = None,
) -> list[Value]:  # fmt: skip
    """weight f[V,D], ids i64[N], offsets (the start of each bag) i64[B] -> [f[B,D]]. Ids equal to
    `padding` do not count. Torch's other results serve its own backward, and are left out."""
    refuse_table("embedding_bag", by_freq, sparse)
    ids, offsets = index64(c, ids), index64(c, offsets)
    (count,), (bags,) = type_of(ids).shape, type_of(offsets).shape
    bags = bags - 1 if last else bags
    dtype, (rows, _) = type_of(weight).dtype, type_of(weight).shape
    bag = _bag_of_each(c, offsets, count)
    live: Value | None = None
    if padding is not None:
        number = c.value(padding if padding >= 0 else rows + padding, DType.INT64)
        live = c.b.Not(c.b.Equal(ids, number))
    found = c.b.Gather(weight, ids, axis=0)
    if _MODES[mode] == "max":
        return [_largest(c, found, bag, live, bags)]
    if per_sample is not None:
        found = c.b.Mul(found, c.b.unsqueeze(per_sample, [1]))
    if live is not None:
        found = c.b.Where(c.b.unsqueeze(live, [1]), found, c.b.scalar(0.0, dtype))
    place = c.b.unsqueeze(bag, [1])
    zeros = c.b.full(0.0, Type(dtype, (bags, type_of(weight).shape[1])))
    total = c.b.ScatterND(zeros, place, found, reduction="add")
    if _MODES[mode] == "sum":
        return [total]
    held = c.b.full(1.0, Type(dtype, (count,))) if live is None else c.b.cast(live, dtype)
    sizes = c.b.full(0.0, Type(dtype, (bags,)))
    sizes = c.b.Max(c.b.ScatterND(sizes, place, held, reduction="add"), c.b.scalar(1.0, dtype))
    return [c.b.Div(total, c.b.unsqueeze(sizes, [1]))]


def _own_embedding_bag(
    c: AtenCall, weight: Value, ids: Value, offsets: Value, by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample: Value | None = None, last: bool = False, padding: int = -1,
) -> list[Value]:  # fmt: skip
    """Translates `aten._embedding_bag`, where a padding of -1 means that there is none."""
    row = padding if padding >= 0 else None
    return _embedding_bag(c, weight, ids, offsets, by_freq, mode, sparse, per_sample, last, row)


def _bag_of_each(c: AtenCall, offsets: Value, count: Size) -> Value:
    """Returns the bag of each id, i64[count]: the number of bags that begin up to it, minus one."""
    begun = c.b.full(0, Type(DType.INT64, (count + 1,)))  # the last entry: bags at the end, empty
    ones = c.b.full(1, type_of(offsets))
    begun = c.b.ScatterND(begun, c.b.unsqueeze(offsets, [1]), ones, reduction="add")
    begun = c.b.CumSum(c.b.slice(begun, 0, 0, count), np.array(0, dtype=np.int64))
    return c.b.Sub(begun, 1)


def _largest(c: AtenCall, found: Value, bag: Value, live: Value | None, bags: Size) -> Value:
    """Returns the maximum over each bag, f[B,D], 0 for an empty one. found: the rows f[N,D]. bag:
    i64[N]. live: b[N], which rows count. Of equal elements the first gets the gradient."""
    dtype, (count, width) = type_of(found).dtype, type_of(found).shape
    ranked, index = found, c.b.expand(c.b.unsqueeze(bag, [1]), (count, width))
    if live is not None:
        least = c.b.scalar(-math.inf, dtype)
        ranked = c.b.Where(c.b.unsqueeze(live, [1]), found, least)
    low = c.b.full(-math.inf, Type(dtype, (bags, width)))
    best = c.b.ScatterElements(low, index, ranked, axis=0, reduction="max")
    wins = c.b.Equal(ranked, c.b.GatherElements(best, index, axis=0))
    if live is not None:
        wins = c.b.And(wins, c.b.unsqueeze(live, [1]))
    behind = c.value(count, DType.INT64)
    place = c.b.Where(wins, c.b.unsqueeze(c.b.arange(count), [1]), behind)
    none = c.b.expand(behind, (bags, width))
    first = c.b.ScatterElements(none, index, place, axis=0, reduction="min")
    empty = c.b.Equal(first, behind)
    chosen = c.b.Where(empty, c.b.scalar(0, DType.INT64), first)
    y = c.b.GatherElements(found, chosen, axis=0)
    return c.b.Where(empty, c.b.scalar(0.0, dtype), y)


TABLE = table(
    {
        _embedding_bag: "embedding_bag.default embedding_bag.padding_idx",
        _own_embedding_bag: "_embedding_bag.default _embedding_bag_forward_only.default",
    }
)
