"""Indexing: slices, gathers, scatters, sorting, embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.capture.held_sizes import SizeError
from onward.errors import CaptureError
from onward.graph.graph import Value, array_of, type_of
from onward.graph.types import DType, Size, Type, broadcast, product

_END = 2**31  # torch writes INT64_MAX for "to the end"


def _slice(
    c: AtenCall, x: Value, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Value:
    dim = dim % type_of(x).rank
    size = type_of(x).shape[dim]
    if step != 1:
        if isinstance(start, int) and start < 0 and not isinstance(size, int):
            # whether the start lies before the first element depends on the size
            raise SizeError(c.node.args[0].meta["val"].shape[dim].node.expr, as_number=True)
        first, _ = c.bounds(size, start, None)
        return steps(c, x, dim, first, step, c.type.shape[dim])
    first, last = c.bounds(size, start, end)
    if first == 0 and last == size:
        return x
    return c.b.slice(x, dim, first, _END if last == size else last)


def steps(c: AtenCall, x: Value, dim: int, start: Size, step: int, count: Size) -> Value:
    """Returns the elements `start + i * step` of a dim, for i < count."""
    places = c.b.Mul(c.b.arange(count), c.b.scalar(step, DType.INT64))
    places = c.b.Add(places, c.b.reshape(c.b.size(start), ()))
    return c.b.Gather(x, places, axis=dim)


def _unfold(c: AtenCall, x: Value, dim: int, size: int, step: int) -> Value:
    """Returns windows of length `size` along a dim, each in a new last dim."""
    if not type_of(x).rank:
        return c.b.reshape(x, c.type.shape)
    dim = dim % type_of(x).rank
    count = c.type.shape[dim]
    starts = c.b.Mul(c.b.arange(count), c.b.scalar(step, DType.INT64))
    places = c.b.Add(c.b.unsqueeze(starts, [1]), c.b.arange(size))  # i64[count,size]
    windows = c.b.Gather(x, places, axis=dim)
    rest = [d for d in range(type_of(windows).rank) if d != dim + 1]
    return c.b.transpose(windows, [*rest, dim + 1])


def _diagonal(c: AtenCall, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    rank = type_of(x).rank
    dim1, dim2 = dim1 % rank, dim2 % rank
    rest = [d for d in range(rank) if d not in (dim1, dim2)]
    x = c.b.transpose(x, [*rest, dim1, dim2])
    *outer, rows, columns = type_of(x).shape
    flat = c.b.reshape(x, (*outer, rows * columns))
    places = places_of_diagonal(c, columns, offset, c.type.shape[-1])
    return c.b.Gather(flat, places, axis=len(outer))


def _trace(c: AtenCall, x: Value) -> Value:
    rows, columns = type_of(x).shape
    if rows != columns and not (isinstance(rows, int) and isinstance(columns, int)):
        sizes = c.node.args[0].meta["val"].shape
        raise SizeError(next(n for n in sizes if not isinstance(n, int)).node.expr, as_number=True)
    count = rows if rows == columns else min(int(rows), int(columns))  # type: ignore[arg-type]
    flat = c.b.reshape(x, (product((rows, columns)),))
    found = c.b.Gather(flat, places_of_diagonal(c, columns, 0, count), axis=0)
    return c.b.reduce_sum(c.value(found, c.type.dtype), [0], keepdims=False)


def places_of_diagonal(c: AtenCall, columns: Size, offset: int, count: Size) -> Value:
    """Returns the places of a diagonal in a flattened matrix with so many columns, i64[count]."""
    start = offset if offset >= 0 else columns * -offset
    places = c.b.Mul(c.b.arange(count), c.value(columns + 1, DType.INT64))
    return c.b.Add(places, c.value(start, DType.INT64))


def _scatter(c: AtenCall, x: Value, dim: int, index: Value, source: Any, **more: Any) -> Value:
    reduction = "add" if "scatter_add" in str(c.node.target) else more.get("reduce")
    if reduction not in (None, "add") or not type_of(x).rank:
        raise CaptureError(
            f"scatter with reduce={reduction!r} or into a 0-dim tensor has no "
            "translation; fix: reduce='add', or scatter_reduce"
        )
    dim = dim % type_of(x).rank
    if isinstance(source, Value) and type_of(source).rank:
        source = c.value(source, c.type.dtype)
        for d, size in enumerate(type_of(index).shape):  # cut to the part that has an index
            if type_of(source).shape[d] != size:
                source = c.b.slice(source, d, 0, size)
    else:
        source = c.b.expand(c.value(source, c.type.dtype), type_of(index).shape)
    index = index64(c, index)
    return c.b.ScatterElements(x, index, source, axis=dim, reduction=reduction or "none")


def _index_add(
    c: AtenCall, x: Value, dim: int, index: Value, source: Value, *, alpha: float = 1
) -> Value:
    """Adds rows of `source` to the rows of a dim that the index names, repeats included."""
    dim, rank = dim % type_of(x).rank, type_of(x).rank
    order = [dim, *(d for d in range(rank) if d != dim)]
    back = inverse(order)
    moved, rows = c.b.transpose(x, order), c.b.transpose(source, order)
    rows = rows if alpha == 1 else c.b.Mul(rows, c.value(alpha, c.type.dtype))
    place = c.b.unsqueeze(index64(c, index), [1])
    return c.b.transpose(c.b.ScatterND(moved, place, rows, reduction="add"), back)


def _index_put(
    c: AtenCall, x: Value, indices: list[Value | None], source: Value, accumulate: bool = False
) -> Value:
    used = [i for i in indices if i is not None]
    if any(type_of(i).dtype in (DType.BOOL, DType.UINT8) for i in used):
        if len(used) == 1 and not accumulate and type_of(source).rank == 0:
            mask = used[0]
            before = next(d for d, i in enumerate(indices) if i is not None)  # dims, all of each
            rest = type_of(x).rank - before - type_of(mask).rank
            if rest:
                mask = c.b.unsqueeze(mask, [type_of(mask).rank + d for d in range(rest)])
            return c.b.Where(c.b.cast(mask, DType.BOOL), c.value(source, c.type.dtype), x)
        raise CaptureError(
            "assigning a tensor through a boolean mask (x[mask] = values) has "
            "no translation; fix: torch.where(mask, values, x)"
        )
    shape = broadcast(*[type_of(i).shape for i in used])
    dims = [d for d, i in enumerate(indices) if i is not None]
    order = _first(dims, type_of(x).rank)
    x = c.b.transpose(x, order)
    places = []
    for d, i in enumerate(used):
        index = from_the_start(c, index64(c, i), type_of(x).shape[d])
        places.append(c.b.unsqueeze(c.b.expand(index, shape), [len(shape)]))
    full = (*shape, *type_of(x).shape[len(used) :])
    found = _found_first(dims, len(shape), len(full))
    wanted = [full[d] for d in inverse(found)]
    rows = c.b.transpose(c.b.expand(c.value(source, c.type.dtype), tuple(wanted)), found)
    place = places[0] if len(places) == 1 else c.b.Concat(*places, axis=len(shape))
    made = c.b.ScatterND(x, place, rows, reduction="add" if accumulate else "none")
    return c.b.transpose(made, inverse(order))


def _masked_scatter(c: AtenCall, x: Value, mask: Value, source: Value) -> Value:
    """Puts the source's elements, in order, in the places where the mask is true."""
    shape = c.type.shape
    mask = c.b.expand(mask, shape)
    count, held = product(shape), product(type_of(source).shape)
    flat = c.b.reshape(c.b.cast(mask, DType.INT64), (count,))
    number = c.b.Sub(c.b.CumSum(flat, np.array(0, dtype=np.int64)), c.b.scalar(1, DType.INT64))
    first, last = c.b.scalar(0, DType.INT64), c.b.reshape(c.b.size(held - 1), ())
    number = c.b.Min(c.b.Max(number, first), last)  # in range also where the mask is false
    taken = c.b.Gather(c.b.reshape(source, (held,)), number, axis=0)
    return c.b.Where(mask, c.b.reshape(taken, shape), c.b.expand(x, shape))


def _as_strided(
    c: AtenCall, x: Value, size: list[Any], stride: list[Any], offset: Any = None
) -> Value:
    """Gathers elements by their places in memory. Raises CaptureError unless x is contiguous up to
    a permutation of dims, and starts at offset 0 of its storage."""
    held = c.node.args[0].meta["val"]
    order = sorted(range(held.dim()), key=lambda d: _stride_of(held, d), reverse=True)
    if held.storage_offset() != 0 or not held.permute(order).is_contiguous():
        raise CaptureError(
            "as_strided of a non-contiguous tensor has no translation; fix: "
            "call .contiguous() first"
        )
    x = x if order == sorted(order) else c.b.transpose(x, order)
    flat = c.b.reshape(x, (product(type_of(x).shape),))
    if not all(isinstance(n, int) for n in (*size, *stride, offset or 0)):
        return c.b.Gather(flat, _places(c, size, stride, offset or 0), axis=0)
    place = np.array(offset or 0, dtype=np.int64)
    for n, step in zip(size, stride, strict=True):
        place = place[..., None] + np.arange(n, dtype=np.int64) * step
    return c.b.Gather(flat, c.b.const(np.ascontiguousarray(place)), axis=0)


def _stride_of(x: Any, dim: int) -> int:
    """Returns a dim's stride in the traced batch."""
    n = x.stride(dim)
    return int(n if isinstance(n, int) else n.node.hint)


def _places(c: AtenCall, size: list[Any], stride: list[Any], offset: Any) -> Value:
    """Returns the places at these sizes and strides, which may be symbolic, i64[*size]."""
    place = c.value(offset, DType.INT64)
    for d, (n, step) in enumerate(zip(size, stride, strict=True)):
        along = c.b.Mul(c.b.arange(n), c.value(step, DType.INT64))
        place = c.b.Add(place, c.b.reshape(along, (n, *[1] * (len(size) - 1 - d))))
    return place


def _select_scatter(c: AtenCall, x: Value, source: Value, dim: int, index: Any) -> Value:
    dim = dim % type_of(x).rank
    size = type_of(x).shape[dim]
    index, _ = c.bounds(size, index, None)
    return between(c, x, c.b.unsqueeze(source, [dim]), dim, index, index + 1)


def between(c: AtenCall, x: Value, source: Value, dim: int, start: Size, end: Size) -> Value:
    """Returns x with `source` in place of `start:end` along a dim."""
    size = type_of(x).shape[dim]
    parts = [c.value(source, c.type.dtype)]
    if start != 0:
        parts.insert(0, c.b.slice(x, dim, 0, start))
    if end != size:
        parts.append(c.b.slice(x, dim, end, size))
    return c.b.Concat(*parts, axis=dim) if len(parts) > 1 else parts[0]


def _bucketize(c: AtenCall, x: Value, bounds: Value, *, right: bool = False, **more: Any) -> Value:
    """Returns how many of the sorted bounds f[N] are below each x, or at most x if `right`."""
    if "searchsorted" in str(c.node.target):
        x, bounds = bounds, x
        right = right or more.get("side") == "right"
    sorter = more.get("sorter")
    if sorter is not None:
        bounds = c.b.GatherElements(bounds, sorter, axis=type_of(bounds).rank - 1)
    if type_of(bounds).rank > 1:  # each row of x has bounds of its own
        bounds = c.b.unsqueeze(bounds, [type_of(bounds).rank - 1])
    dtype = type_of(bounds).dtype
    if type_of(x).is_floating and not type_of(bounds).is_floating:
        dtype = type_of(x).dtype
    rank = type_of(x).rank
    number = c.b.unsqueeze(c.value(x, dtype), [rank])
    op = c.b.Greater if right else c.b.GreaterOrEqual
    below = c.b.Not(op(c.value(bounds, dtype), number))  # of NaN: all bounds, as torch
    below = c.b.cast(below, DType.INT64)
    return c.b.cast(c.b.reduce_sum(below, [rank], keepdims=False), c.type.dtype)


def _topk(
    c: AtenCall, x: Value, k: Any, dim: int = -1, largest: bool = True, ordered: bool = True
) -> list[Value]:
    return _ordered(c, x, k, dim, largest)


def _sort(c: AtenCall, x: Value, *args: Any, **more: Any) -> list[Value]:
    """`sort(x, dim, descending)` and `sort(x, *, stable, dim, descending)`."""
    stable = "stable" in str(c.node.target)
    rest = list(args[1:] if stable else args)
    dim = more.get("dim", rest.pop(0) if rest else -1)
    descending = more.get("descending", rest.pop(0) if rest else False)
    size = type_of(x).shape[dim % type_of(x).rank] if type_of(x).rank else 1
    return _ordered(c, x, size, dim, descending)


def _ordered(c: AtenCall, x: Value, k: Any, dim: int, largest: bool) -> list[Value]:
    if not type_of(x).rank:
        return [x, c.b.full(0, Type(DType.INT64, ()))]
    attrs = {"axis": dim % type_of(x).rank, "largest": int(largest), "sorted": 1}
    found = c.b.node("TopK", [x, c.b.size(k)], attrs)
    assert isinstance(found, tuple)
    return list(found)


def _select(c: AtenCall, x: Value, dim: int, index: Any) -> Value:
    dim = dim % type_of(x).rank
    index, _ = c.bounds(type_of(x).shape[dim], index, None)
    return c.b.squeeze(c.b.slice(x, dim, index, index + 1), [dim])


def _embedding(
    c: AtenCall, weight: Value, ids: Value, padding_idx: int = -1, by_freq: bool = False,
    sparse: bool = False,
) -> Value:  # fmt: skip
    refuse_table("embedding", by_freq, sparse)
    ids = index64(c, ids)
    if padding_idx >= 0:
        return c.b.Embedding(weight, ids, padding_idx=padding_idx)
    return c.b.Gather(weight, ids, axis=0)


def refuse_table(op: str, by_freq: bool, sparse: bool) -> None:
    """Raises CaptureError for settings of a table of rows whose gradients no graph has."""
    if sparse:
        raise CaptureError(
            f"{op} with sparse=True, and the gradients of a graph are dense; fix: sparse=False"
        )
    if by_freq:
        raise CaptureError(f"{op} with scale_grad_by_freq=True; fix: leave it out")


def index64(c: AtenCall, index: Value) -> Value:
    """Returns an index tensor as i64, which every kernel reads. Raises CaptureError for another
    dtype than i64 and i32, which an export does not check."""
    dtype = type_of(index).dtype
    if dtype not in (DType.INT64, DType.INT32):
        raise CaptureError(
            f"the index tensor is of {dtype}, which PyTorch refuses; fix: convert it to torch.int64"
        )
    return c.b.cast(index, DType.INT64)


def _one_hot(c: AtenCall, x: Value, num_classes: int = -1) -> Value:
    """Returns i64[*S,C]: 1 in the place that each number of `x`, i64[*S], says. A number that is no
    class raises IndexError, where torch raises RuntimeError."""
    count = c.value(c.type.shape[-1], DType.INT64)
    numbers = c.b.InRange(index64(c, x), count, what="label")
    equal = c.b.Equal(c.b.unsqueeze(numbers, [type_of(x).rank]), c.b.arange(c.type.shape[-1]))
    return c.b.cast(equal, DType.INT64)


def _index_select(c: AtenCall, x: Value, dim: int, index: Value) -> Value:
    return c.b.Gather(x, index64(c, index), axis=dim % type_of(x).rank)


def _gather(c: AtenCall, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    return c.b.GatherElements(x, index64(c, index), axis=dim % type_of(x).rank)


def from_the_start(c: AtenCall, index: Value, rows: Size) -> Value:
    """Returns an index with negative numbers counted from the end, which Gather's kernels, unlike
    GatherND's, do not accept. rows: the size of the dim."""
    source: Value | None = index
    while source is not None and (maker := source.producer()) is not None:
        if maker.op_type == "Range":
            start = array_of(maker.inputs[0])
            if start is not None and start >= 0:
                return index
        if maker.op_type not in ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Transpose"):
            break
        source = maker.inputs[0]
    numbers = array_of(index)
    if numbers is not None and (numbers >= 0).all():
        return index
    wrapped = c.b.Add(index, c.b.reshape(c.b.size(rows), ()))
    return c.b.Where(c.b.Less(index, c.b.scalar(0, DType.INT64)), wrapped, index)


def _index(c: AtenCall, x: Value, indices: list[Value | None]) -> Value:
    """`x[i, j, ...]` with integer tensors on the leading dims."""
    used = [i for i in indices if i is not None]
    # torch takes uint8 tensors as masks too
    if any(type_of(i).dtype in (DType.BOOL, DType.UINT8) for i in used):
        raise CaptureError(
            "indexing with a boolean mask gives a number of rows that depends on the data; "
            "fix: keep all rows, and multiply those to skip by 0 or give them the label -100"
        )
    used = [index64(c, i) for i in used]
    dims = [d for d, i in enumerate(indices) if i is not None]
    if len(used) == 1:
        return c.b.Gather(x, from_the_start(c, used[0], type_of(x).shape[dims[0]]), axis=dims[0])
    shape = broadcast(*[type_of(i).shape for i in used])
    rows = [c.b.unsqueeze(c.b.expand(i, shape), [len(shape)]) for i in used]
    moved = c.b.transpose(x, _first(dims, type_of(x).rank))
    y = c.b.GatherND(moved, c.b.Concat(*rows, axis=len(shape)))
    return c.b.transpose(y, inverse(_found_first(dims, len(shape), type_of(y).rank)))


def _first(dims: list[int], rank: int) -> list[int]:
    """Returns the permutation that puts the indexed dims before the others."""
    return [*dims, *(d for d in range(rank) if d not in dims)]


def _found_first(dims: list[int], found: int, rank: int) -> list[int]:
    """Returns the permutation that puts a result's dims from the indices, `found` of them, first.
    Torch puts them in the place of adjacent indices, and first if the indices are not adjacent
    (https://numpy.org/doc/stable/user/basics.indexing.html#combining-advanced-and-basic-indexing).
    """
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    return _first(list(range(at, at + found)), rank)


def inverse(order: list[int]) -> list[int]:
    """Returns the inverse of a permutation."""
    return sorted(range(len(order)), key=order.__getitem__)


TABLE = table(
    {
        _slice: "slice.Tensor",
        _select: "select.int",
        _embedding: "embedding.default",
        _one_hot: "one_hot.default",
        _index_select: "index_select.default",
        _gather: "gather.default",
        _index: "index.Tensor",
        _unfold: "unfold.default",
        _diagonal: "diagonal.default",
        _trace: "trace.default",
        _scatter: "scatter.src scatter.value scatter_add.default",
        _index_add: "index_add.default",
        _index_put: "index_put.default",
        _masked_scatter: "masked_scatter.default",
        _as_strided: "as_strided.default",
        _select_scatter: "select_scatter.default",
        _bucketize: "bucketize.Tensor searchsorted.Tensor",
        _topk: "topk.default",
        _sort: "sort.default sort.stable",
    }
)
