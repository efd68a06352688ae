"""Parts of a tensor, by place or by an index tensor."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value, array_of, type_of
from onward.graph.types import DType, Size, broadcast

_END = 2**31  # torch writes INT64_MAX for "to the end"


def _slice(
    c: Call, x: Value, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Value:
    if step != 1:
        raise CaptureError("a slice with a step other than 1")
    size = type_of(x).shape[dim % type_of(x).rank]
    start = 0 if start is None else start
    if end is None or (isinstance(end, int) and end >= _END) or end == size:
        end = _END
    if start == 0 and end == _END:
        return x
    return c.b.slice(x, dim % type_of(x).rank, start, end)


def _select(c: Call, x: Value, dim: int, index: Any) -> Value:
    dim = dim % type_of(x).rank
    size = type_of(x).shape[dim]
    if isinstance(index, int) and index < 0:
        index = size + index
    return c.b.squeeze(c.b.slice(x, dim, index, index + 1), [dim])


def _embedding(
    c: Call, weight: Value, ids: Value, padding_idx: int = -1, by_freq: bool = False,
    sparse: bool = False,
) -> Value:  # fmt: skip
    if by_freq or sparse:
        raise CaptureError("embedding with scale_grad_by_freq or sparse gradients")
    ids = _index64(c, ids)
    if padding_idx >= 0:
        return c.b.Embedding(weight, ids, padding_idx=padding_idx)
    return c.b.Gather(weight, ids, axis=0)


def _index64(c: Call, index: Value) -> Value:
    """Numbers of rows as i64, which every kernel reads. An export asks for no dtype."""
    dtype = type_of(index).dtype
    if dtype not in (DType.INT64, DType.INT32):
        raise CaptureError(
            f"rows numbered by a tensor of {dtype}, which PyTorch refuses; fix: convert it to "
            "torch.int64"
        )
    return c.b.cast(index, DType.INT64)


def _index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    return c.b.Gather(x, _index64(c, index), axis=dim % type_of(x).rank)


def _gather(c: Call, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    return c.b.GatherElements(x, _index64(c, index), axis=dim % type_of(x).rank)


def _from_the_start(c: Call, index: Value, rows: Size) -> Value:
    """A negative number is one from the end, unlike in an embedding; Gather's kernels take none.
    (GatherND's do.)"""
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


def _index(c: Call, x: Value, indices: list[Value | None]) -> Value:
    """`x[i, j, ...]` with integer tensors on the leading dims."""
    used = [i for i in indices if i is not None]
    # bytes are a mask too, and not numbers of rows
    if any(type_of(i).dtype in (DType.BOOL, DType.UINT8) for i in used):
        raise CaptureError(
            "indexing with a boolean tensor: how many rows that gives, only data say; fix: keep "
            "all rows, and weigh them with 0 or ignore their labels"
        )
    if any(i is None for i in indices):
        raise CaptureError("indexing with gaps between the indices; fix: permute the dims first")
    used = [_index64(c, i) for i in used]
    if len(used) == 1:
        return c.b.Gather(x, _from_the_start(c, used[0], type_of(x).shape[0]), axis=0)
    shape = broadcast(*[type_of(i).shape for i in used])
    rows = [c.b.unsqueeze(c.b.expand(i, shape), [len(shape)]) for i in used]
    return c.b.GatherND(x, c.b.Concat(*rows, axis=len(shape)))


TABLE = table(
    {
        _slice: "slice.Tensor",
        _select: "select.int",
        _embedding: "embedding.default",
        _index_select: "index_select.default",
        _gather: "gather.default",
        _index: "index.Tensor",
    }
)
