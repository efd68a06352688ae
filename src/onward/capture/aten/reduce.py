"""Reductions, running sums and differences along dims."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.elementwise import logaddexp
from onward.capture.held_sizes import SizeError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Size, Type, product

_REDUCTIONS = {
    "sum": "ReduceSum", "mean": "ReduceMean", "amax": "ReduceMax", "amin": "ReduceMin",
    "max": "ReduceMax", "min": "ReduceMin", "prod": "ReduceProd",
}  # fmt: skip


def _reduce(c: AtenCall, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    name = c.node.target._schema.name.split("::")[1]
    op_type = _REDUCTIONS[name]
    return reduce_to(c, op_type, c.value(x, c.type.dtype), dims, keepdim)


def reduce_to(c: AtenCall, op_type: str, x: Value, dims: Any, keepdim: bool) -> Value:
    """Reduces x by an ONNX op. dims: as in torch, one, several, or None for all."""
    return c.b.one(op_type, [x, c.b.ints(dims_of(x, dims))], {"keepdims": int(keepdim)})


def dims_of(x: Value, dims: Any) -> list[int]:
    """Returns torch's `dims` as numbers from 0: one, several, or all for None."""
    rank = type_of(x).rank
    return list(range(rank)) if not dims and dims != 0 else [d % rank for d in _list(dims)]


def _list(x: Any) -> list[int]:
    return [x] if isinstance(x, int) else list(x)


def _cumsum(c: AtenCall, x: Value, dim: int, **_: Any) -> Value:
    return c.b.CumSum(c.value(x, c.type.dtype), np.array(dim % type_of(x).rank, dtype=np.int64))


def _before(c: AtenCall, x: Value, dim: int, fill: float, count: int) -> Value:
    """Returns x shifted by `count` places along a dim, with `fill` in the first places."""
    ends = [0] * 2 * type_of(x).rank
    ends[dim] = count
    size = type_of(x).shape[dim]
    moved = c.b.slice(x, dim, 0, size - count)
    return c.b.Pad(moved, c.b.ints(ends), c.b.scalar(fill, type_of(x).dtype))


def _cumprod(c: AtenCall, x: Value, dim: int, **_: Any) -> Value:
    """Cumulative product, by doubling: multiplies by the number 1, then 2, 4, ... places before."""
    x = c.value(x, c.type.dtype)
    dim = dim % type_of(x).rank
    step = 1
    while step < _known(c, type_of(x).shape[dim], dim):
        x, step = c.b.Mul(x, _before(c, x, dim, 1, step)), 2 * step
    return x


def _known(c: AtenCall, size: Size, dim: int) -> int:
    """Returns a size as a number. Raises SizeError for a symbolic one."""
    if not isinstance(size, int):
        raise SizeError(c.node.args[0].meta["val"].shape[dim].node.expr, as_number=True)
    return size


def _logcumsumexp(c: AtenCall, x: Value, dim: int) -> Value:
    """Cumulative logsumexp, by doubling: adds the number 1, then 2, 4, ... places before."""
    dim = dim % type_of(x).rank
    step = 1
    while step < _known(c, type_of(x).shape[dim], dim):
        x, step = logaddexp(c, x, _before(c, x, dim, -math.inf, step)), 2 * step
    return x


def _cumulative_extreme(c: AtenCall, x: Value, dim: int) -> list[Value]:
    """Returns the running maximum (or minimum) and its index: of equal ones the last, as torch."""
    if not type_of(x).rank:
        return [x, c.b.full(0, Type(DType.INT64, ()))]
    dim = dim % type_of(x).rank
    size = _known(c, type_of(x).shape[dim], dim)
    least = str(c.node.target).startswith("aten.cummin")
    ranked = _ranked(c, x, least)
    apart = [1] * type_of(x).rank
    apart[dim] = size
    place = c.b.const(np.arange(size, dtype=np.int64).reshape(apart))
    place = c.b.expand(place, type_of(x).shape)
    step, lowest = 1, -math.inf if type_of(x).is_floating else -(2**63)
    while step < size:
        before, held = _before(c, ranked, dim, lowest, step), _before(c, place, dim, 0, step)
        later = c.b.GreaterOrEqual(ranked, before)
        if type_of(x).is_floating:
            later = c.b.Or(later, c.b.IsNaN(ranked))
        ranked, place = c.b.Where(later, ranked, before), c.b.Where(later, place, held)
        step *= 2
    return [c.b.GatherElements(x, place, axis=dim), place]


def _ranked(c: AtenCall, x: Value, least: bool) -> Value:
    """Returns numbers whose maximum is where x has its maximum, or its minimum if `least`."""
    if least:
        return c.b.in_reverse(x)
    return x if type_of(x).is_floating else c.b.cast(x, DType.INT64)


def _argmax(c: AtenCall, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    x = _ranked(c, x, least="argmin" in str(c.node.target))
    if dim is None:
        flat = c.b.ArgMax(c.b.reshape(x, (product(type_of(x).shape),)), axis=0, keepdims=0)
        return c.b.reshape(flat, c.type.shape)
    if not type_of(x).rank:
        return c.b.full(0, c.type)
    return c.b.ArgMax(x, axis=dim % type_of(x).rank, keepdims=int(keepdim))


def _extreme(c: AtenCall, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    """Returns the maximum (or minimum) along a dim and its index, which gets the gradient."""
    if not type_of(x).rank:
        return [x, c.b.full(0, Type(DType.INT64, ()))]
    dim = dim % type_of(x).rank
    ranked = _ranked(c, x, least=str(c.node.target).startswith("aten.min"))
    place = c.b.ArgMax(ranked, axis=dim, keepdims=1)
    found = [c.b.GatherElements(x, place, axis=dim), place]
    return found if keepdim else [c.b.squeeze(v, [dim]) for v in found]


def _moments(
    c: AtenCall, x: Value, dims: Any, correction: float | None, keepdim: bool
) -> tuple[Value, Value]:
    """Returns the variance and the mean over dims."""
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
    c: AtenCall,
    x: Value,
    dims: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    variance = _moments(c, x, dims, correction, keepdim)[0]
    return root(c, variance) if "std" in str(c.node.target) else variance


def _variance_mean(
    c: AtenCall,
    x: Value,
    dims: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> list[Value]:
    variance, mean = _moments(c, x, dims, correction, keepdim)
    return [root(c, variance) if "std" in str(c.node.target) else variance, mean]


def root(c: AtenCall, x: Value) -> Value:
    """Returns the square root, with gradient 0 at 0 (not infinity), which is PyTorch's convention
    for norms and deviations."""
    dtype = type_of(x).dtype
    zero = c.b.Equal(x, 0.0)
    root = c.b.Sqrt(c.b.Where(zero, c.b.scalar(1.0, dtype), x))
    return c.b.Where(zero, c.b.scalar(0.0, dtype), root)


def _least_and_largest(
    c: AtenCall, x: Value, *, dim: int | None = None, keepdim: bool = False
) -> list[Value]:
    return [reduce_to(c, op, x, dim, keepdim) for op in ("ReduceMin", "ReduceMax")]


def _diff(
    c: AtenCall, x: Value, n: int = 1, dim: int = -1, before: Value | None = None,
    after: Value | None = None,
) -> Value:  # fmt: skip
    dim = dim % type_of(x).rank
    if n == 0:
        return x
    parts = [v for v in (before, x, after) if v is not None]
    x = c.b.Concat(*parts, axis=dim) if len(parts) > 1 else x
    for _ in range(n):
        size = type_of(x).shape[dim]
        if isinstance(size, int) and size <= 1:
            return c.b.slice(x, dim, 0, 0)
        pair = c.b.slice(x, dim, 1, size), c.b.slice(x, dim, 0, size - 1)
        x = c.b.Xor(*pair) if type_of(x).dtype == DType.BOOL else c.b.Sub(*pair)
    return x


TABLE = table(
    {
        _reduce: "sum.default sum.dim_IntList mean.default mean.dim amax.default amin.default "
        "max.default min.default prod.default prod.dim_int",
        _extreme: "max.dim min.dim",
        _variance: "var.correction std.correction",
        _variance_mean: "var_mean.correction std_mean.correction",
        _cumsum: "cumsum.default",
        _cumprod: "cumprod.default",
        _logcumsumexp: "logcumsumexp.default",
        _cumulative_extreme: "cummax.default cummin.default",
        _argmax: "argmax.default argmin.default",
        _least_and_largest: "aminmax.default",
        _diff: "diff.default",
    }
)
