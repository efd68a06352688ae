"""Writes to places of a tensor: reduced by sum, product, mean or extreme, along a diagonal, or with
a step."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.copies import stop_gradient
from onward.capture.aten.elementwise import floor_divide
from onward.capture.aten.indexing import (
    between,
    from_the_start,
    index64,
    inverse,
    places_of_diagonal,
)
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, broadcast, product

_JOINED = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def cut_to_index(c: AtenCall, source: Value, index: Value) -> Value:
    """Returns the part of a source that has an index."""
    for d, size in enumerate(type_of(index).shape):
        if type_of(source).shape[d] != size:
            source = c.b.slice(source, d, 0, size)
    return source


def _scatter_reduce(
    c: AtenCall, x: Value, dim: int, index: Value, source: Value, reduce: str, *,
    include_self: bool = True,
) -> Value:  # fmt: skip
    dim = dim % type_of(x).rank
    return _joined(c, x, dim, index64(c, index), cut_to_index(c, source, index), reduce,
                   include_self)  # fmt: skip


def _index_reduce(
    c: AtenCall, x: Value, dim: int, index: Value, source: Value, reduce: str, *,
    include_self: bool = True,
) -> Value:  # fmt: skip
    """Reduces rows of `source` into the rows of a dim that the index names."""
    dim, shape = dim % type_of(x).rank, type_of(source).shape
    apart = (*[1] * dim, product(type_of(index).shape), *[1] * (len(shape) - dim - 1))
    broadcast(apart, shape)  # raises ValueError where the counts are not known to be the same
    places = c.b.expand(c.b.reshape(index64(c, index), apart), shape)
    return _joined(c, x, dim, places, source, reduce, include_self)


def _joined(
    c: AtenCall, x: Value, dim: int, index: Value, source: Value, reduce: str, with_own: bool
) -> Value:
    if reduce not in _JOINED:
        raise CaptureError(
            f"reduce={reduce!r} has no translation; fix: one of {', '.join(_JOINED)}"
        )
    type, kind = type_of(x), _JOINED[reduce]
    if type.dtype == DType.BOOL:
        raise CaptureError(
            "a scatter or index reduction of torch.bool has no translation; "
            "fix: convert to torch.int64"
        )

    def write(data: Value, rows: Value, kind: str) -> Value:
        return c.b.ScatterElements(data, index, rows, axis=dim, reduction=kind)

    zeros, ones = c.b.full(0, type), c.b.full(1, type_of(source))
    if not with_own:
        x = _without_own(c, x, reduce, c.b.Equal(write(zeros, ones, "none"), 1), source, write)
    y = write(x, source, kind)
    if reduce != "mean":
        return y
    count = write(c.b.full(1, type) if with_own else zeros, ones, "add")
    count = c.b.Where(c.b.Equal(count, 0), c.b.scalar(1, type.dtype), count)
    return c.b.Div(y, count) if type.is_floating else floor_divide(c, y, count)


def _without_own(
    c: AtenCall, x: Value, reduce: str, written: Value, source: Value, write: Any
) -> Value:
    """Returns x with the reduction's neutral element at the places that are written."""
    dtype = type_of(x).dtype
    if reduce not in ("amax", "amin"):
        return c.b.Where(written, c.b.scalar(1 if reduce == "prod" else 0, dtype), x)
    if type_of(x).is_floating:
        bound: float = float("inf" if reduce == "amin" else "-inf")
    else:
        bound = int(dtype.max if reduce == "amin" else dtype.min)
    lost = c.b.Where(written, c.b.scalar(bound, dtype), x)
    if not type_of(x).is_floating:
        return lost
    # Torch counts an element of x that equals the result among those that share the gradient, but
    # gives it no share.
    best = write(lost, source, _JOINED[reduce])
    own = stop_gradient(c.b, x)
    return c.b.Where(c.b.And(written, c.b.Equal(own, best)), own, lost)


def _take(c: AtenCall, x: Value, index: Value) -> Value:
    """Returns the elements of x at flat row-major places, in the shape of `index`."""
    count = product(type_of(x).shape)
    places = from_the_start(c, index64(c, index), count)
    return c.b.Gather(c.b.reshape(x, (count,)), places, axis=0)


def _put(c: AtenCall, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    shape, count, held = type_of(x).shape, product(type_of(x).shape), product(type_of(index).shape)
    broadcast((held,), (product(type_of(source).shape),))  # as in index_reduce
    places = c.b.reshape(from_the_start(c, index64(c, index), count), (held, 1))
    rows = c.b.reshape(source, (held,))
    kind = "add" if accumulate else "none"
    y = c.b.ScatterND(c.b.reshape(x, (count,)), places, rows, reduction=kind)
    return c.b.reshape(y, shape)


def _slice_scatter(
    c: AtenCall, x: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Value:  # fmt: skip
    dim = dim % type_of(x).rank
    start, end = c.bounds(type_of(x).shape[dim], start, end)
    source = c.value(source, c.type.dtype)
    if step == 1:
        return between(c, x, source, dim, start, end)
    order = [dim, *(d for d in range(type_of(x).rank) if d != dim)]
    places = c.b.Mul(c.b.arange(type_of(source).shape[dim]), c.b.scalar(step, DType.INT64))
    places = c.b.Add(places, c.value(start, DType.INT64))
    return _written_first(c, x, order, places, source)


def _diagonal_scatter(
    c: AtenCall, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    rank, shape = type_of(x).rank, type_of(x).shape
    dim1, dim2 = dim1 % rank, dim2 % rank
    rest = [d for d in range(rank) if d not in (dim1, dim2)]
    order = [dim1, dim2, *rest]
    rows, columns, *outer = [shape[d] for d in order]
    flat = c.b.reshape(c.b.transpose(x, order), (rows * columns, *outer))
    count = type_of(source).shape[-1]
    places = places_of_diagonal(c, columns, offset, count)
    source = c.value(source, c.type.dtype)
    y = _written_first(c, flat, list(range(len(outer) + 1)), places, _last_first(c, source))
    return c.b.transpose(c.b.reshape(y, (rows, columns, *outer)), inverse(order))


def _last_first(c: AtenCall, x: Value) -> Value:
    rank = type_of(x).rank
    return c.b.transpose(x, [rank - 1, *range(rank - 1)])


def _written_first(c: AtenCall, x: Value, order: list[int], places: Value, source: Value) -> Value:
    """Returns x with rows of the source at `places` i64[K] of the dim `order[0]`. order: a
    permutation of dims."""
    moved, rows = c.b.transpose(x, order), c.b.transpose(source, order)
    made = c.b.ScatterND(moved, c.b.unsqueeze(places, [1]), rows)
    return c.b.transpose(made, inverse(order))


TABLE = table(
    {
        _scatter_reduce: "scatter_reduce.two",
        _index_reduce: "index_reduce.default",
        _take: "take.default",
        _put: "put.default",
        _slice_scatter: "slice_scatter.default",
        _diagonal_scatter: "diagonal_scatter.default",
    }
)
