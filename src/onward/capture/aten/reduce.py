"""Reductions, running sums and differences along dims."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType


def _reduce(c: Call, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    name = c.node.target._schema.name.split("::")[1]
    op_type = {"sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax"}[name]
    return _reduce_to(c, op_type, c.value(x, c.type.dtype), dims, keepdim)


def _reduce_to(c: Call, op_type: str, x: Value, dims: Any, keepdim: bool) -> Value:
    """torch's `dims`: one, several, or all where none is named."""
    rank = type_of(x).rank
    dims = list(range(rank)) if not dims and dims != 0 else [d % rank for d in _list(dims)]
    return c.b.one(op_type, [x, c.b.ints(dims)], {"keepdims": int(keepdim)})


def _list(x: Any) -> list[int]:
    return [x] if isinstance(x, int) else list(x)


def _cumsum(c: Call, x: Value, dim: int, **_: Any) -> Value:
    return c.b.CumSum(c.value(x, c.type.dtype), np.array(dim % type_of(x).rank, dtype=np.int64))


def _argmax(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is None:
        raise CaptureError("argmax over all dims")
    return c.b.ArgMax(x, axis=dim % type_of(x).rank, keepdims=int(keepdim))


def _vector_norm(
    c: Call, x: Value, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    if order != 2:
        raise CaptureError(f"the norm of order {order}; fix: write it with abs, pow and sum")
    x = c.value(x, c.type.dtype)
    squares = _reduce_to(c, "ReduceSum", c.b.Mul(x, x), dims, keepdim)
    # at zero the root's slope is infinite, and 0 by PyTorch's convention: there it is a constant
    zero = c.b.Equal(squares, 0.0)
    root = c.b.Sqrt(c.b.Where(zero, c.b.scalar(1.0, c.type.dtype), squares))
    return c.b.Where(zero, c.b.scalar(0.0, c.type.dtype), root)


def _diff(
    c: Call, x: Value, n: int = 1, dim: int = -1, before: Value | None = None,
    after: Value | None = None,
) -> Value:  # fmt: skip
    if n != 1 or type_of(x).dtype == DType.BOOL:
        raise CaptureError("diff of bools, or of another order than 1")
    dim = dim % type_of(x).rank
    parts = [v for v in (before, x, after) if v is not None]
    x = c.b.Concat(*parts, axis=dim) if len(parts) > 1 else x
    size = type_of(x).shape[dim]
    return c.b.Sub(c.b.slice(x, dim, 1, size), c.b.slice(x, dim, 0, size - 1))


TABLE = table(
    {
        _reduce: "sum.default sum.dim_IntList mean.default mean.dim amax.default",
        _cumsum: "cumsum.default",
        _argmax: "argmax.default",
        _vector_norm: "linalg_vector_norm.default",
        _diff: "diff.default",
    }
)
