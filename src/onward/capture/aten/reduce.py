"""Reductions, running sums and differences along dims."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Type, product

_REDUCTIONS = {
    "sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin",
    "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd",
}  # fmt: skip


def _reduce(c: Call, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    name = c.node.target._schema.name.split("::")[1]
    op_type = _REDUCTIONS[name]
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


def _ranked(c: Call, x: Value, least: bool) -> Value:
    """Numbers whose largest lies where x has its largest, or its least. Whole ones are mirrored at
    -1/2: the least of them has no negative, and those without a sign have none at all."""
    if not type_of(x).is_floating:
        x = c.b.cast(x, DType.INT64)
        return c.b.Sub(c.b.scalar(-1, DType.INT64), x) if least else x
    return c.b.Neg(x) if least else x


def _argmax(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    x = _ranked(c, x, least="argmin" in str(c.node.target))
    if dim is None:
        flat = c.b.ArgMax(c.b.reshape(x, (product(type_of(x).shape),)), axis=0, keepdims=0)
        return c.b.reshape(flat, c.type.shape)
    if not type_of(x).rank:
        return c.b.full(0, c.type)
    return c.b.ArgMax(x, axis=dim % type_of(x).rank, keepdims=int(keepdim))


def _extreme(c: Call, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    """The largest, or least, along a dim and its place, to which the gradient goes."""
    if not type_of(x).rank:
        return [x, c.b.full(0, Type(DType.INT64, ()))]
    dim = dim % type_of(x).rank
    ranked = _ranked(c, x, least=str(c.node.target).startswith("aten.min"))
    place = c.b.ArgMax(ranked, axis=dim, keepdims=1)
    found = [c.b.GatherElements(x, place, axis=dim), place]
    return found if keepdim else [c.b.squeeze(v, [dim]) for v in found]


def _moments(
    c: Call, x: Value, dims: Any, correction: float | None, keepdim: bool
) -> tuple[Value, Value]:
    """Variance and mean."""
    rank, dtype = type_of(x).rank, type_of(x).dtype
    dims = [d % rank for d in _list(dims)] if dims or dims == 0 else list(range(rank))
    mean = c.b.one("ReduceMean", [x, c.b.ints(dims)], {"keepdims": 1})
    off = c.b.Sub(x, mean)
    squares = c.b.reduce_sum(c.b.Mul(off, off), dims, keepdims=keepdim)
    count = product(type_of(x).shape[d] for d in dims)
    less = 1 if correction is None else correction
    number = c.b.Sub(c.value(count, dtype), c.b.scalar(float(less), dtype))
    variance = c.b.Div(squares, c.b.Max(number, c.b.scalar(0.0, dtype)))
    return variance, mean if keepdim else c.b.squeeze(mean, dims)


def _variance(
    c: Call, x: Value, dims: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Value:
    variance = _moments(c, x, dims, correction, keepdim)[0]
    return _root(c, variance) if "std" in str(c.node.target) else variance


def _variance_mean(
    c: Call, x: Value, dims: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> list[Value]:
    variance, mean = _moments(c, x, dims, correction, keepdim)
    return [_root(c, variance) if "std" in str(c.node.target) else variance, mean]


def _root(c: Call, x: Value) -> Value:
    """At zero the root's slope is infinite, and 0 by PyTorch's convention for norms and deviations:
    there it is a constant."""
    dtype = type_of(x).dtype
    zero = c.b.Equal(x, 0.0)
    root = c.b.Sqrt(c.b.Where(zero, c.b.scalar(1.0, dtype), x))
    return c.b.Where(zero, c.b.scalar(0.0, dtype), root)


def _vector_norm(
    c: Call, x: Value, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    x = c.value(x, c.type.dtype)
    if order in (1, math.inf, -math.inf):
        op_type = {1: "ReduceSum", math.inf: "ReduceMax", -math.inf: "ReduceMin"}[order]
        return _reduce_to(c, op_type, c.b.Abs(x), dims, keepdim)
    if order != 2:
        raise CaptureError(f"the norm of order {order}; fix: write it with abs, pow and sum")
    return _root(c, _reduce_to(c, "ReduceSum", c.b.Mul(x, x), dims, keepdim))


def _cdist(c: Call, a: Value, b: Value, p: float, _: int | None = None) -> Value:
    """`f[*S,M,D]`, `f[*S,N,D]` -> distances `f[*S,M,N]`."""
    if p not in (1, 2, math.inf):
        raise CaptureError(f"cdist of order {p}; fix: write it with abs, pow and sum")
    rank = type_of(a).rank
    off = c.b.Sub(c.b.unsqueeze(a, [rank - 1]), c.b.unsqueeze(b, [rank - 2]))
    if p == 2:
        return _root(c, c.b.reduce_sum(c.b.Mul(off, off), [rank], keepdims=False))
    op_type = "ReduceSum" if p == 1 else "ReduceMax"
    return c.b.one(op_type, [c.b.Abs(off), c.b.ints([rank])], {"keepdims": 0})


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
        _reduce: "sum.default sum.dim_IntList mean.default mean.dim amax.default amin.default "
        "max.default min.default prod.default prod.dim_int",
        _extreme: "max.dim min.dim",
        _variance: "var.correction std.correction",
        _variance_mean: "var_mean.correction std_mean.correction",
        _cdist: "_cdist_forward.default",
        _cumsum: "cumsum.default",
        _argmax: "argmax.default argmin.default",
        _vector_norm: "linalg_vector_norm.default",
        _diff: "diff.default",
    }
)
