"""Reductions and cumulative sums."""

from __future__ import annotations

import numpy as np

from onward.graph.graph import Value
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    numeric,
    require_few,
)
from onward.graph.types import DType

WITH_FRACTIONS = {"ReduceMean"}
_EMPTY = {"ReduceSum": 0, "ReduceSumSquare": 0, "ReduceL1": 0, "ReduceL2": 0, "ReduceProd": 1}


def _dims(c: NodeCall) -> list[int]:
    known = c.ints(1) if c.present(1) else []
    if not known:
        return [] if c.attr("noop_with_empty_axes", 0) else list(range(c.rank()))
    return [d % c.rank() for d in known]


@decomposition(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp",
)  # fmt: skip
def _reduce(c: NodeCall) -> Results:
    b, dims, op, x = c.b, _dims(c), c.op_type, c.x()
    keep = {"keepdims": int(c.attr("keepdims", 1))}
    if any(c.shape()[d] == 0 for d in dims):
        return _of_nothing(c, dims)
    if op in WITH_FRACTIONS and not c.type().is_floating:
        raise ValueError(f"{op} of {c.type()} is not supported; fix: cast it to f32 before")
    if c.type().dtype == DType.BOOL:
        x = b.Cast(x, to=DType.UINT8)
    match op:
        case "ReduceL1":
            return _summed(c, b.Abs(x), dims)
        case "ReduceLogSum":
            return b.Log(_summed(c, x, dims))
        case "ReduceLogSumExp":
            return _log_sum_exp(c, dims)
        case "ReduceSumSquare":
            return _summed(c, b.Mul(x, x), dims)
        case "ReduceL2" if not dims:
            return b.Abs(x)
        case _:
            y = x if not dims else b.node(op, [x, b.ints(dims)], keep)
    assert isinstance(y, Value)
    return b.cast(y, c.type().dtype) if y is not c.x() else b.Identity(y)


def _summed(c: NodeCall, x: Value, dims: list[int]) -> Value:
    return c.b.reduce_sum(x, dims, bool(c.attr("keepdims", 1)))


def _log_sum_exp(c: NodeCall, dims: list[int]) -> Value:
    """ReduceLogSumExp, with the maximum subtracted as a constant, since its gradient cancels."""
    b, x = c.b, c.x()
    if not dims:
        return b.Log(b.Exp(x))
    peak = b.ReduceMax(x, b.ints(dims), keepdims=1)
    bound = np.array(np.finfo(numeric(c.type().dtype)).max, numeric(c.type().dtype))
    peak = b.Where(b.LessOrEqual(b.Abs(peak), bound), peak, b.scalar(0, c.type().dtype))
    peak = b.StopGradient(peak)
    total = b.Log(b.reduce_sum(b.Exp(b.Sub(x, peak)), dims, keepdims=True))
    y = b.Add(total, peak)
    return y if c.attr("keepdims", 1) else b.squeeze(y, dims)


def _of_nothing(c: NodeCall, dims: list[int]) -> Value:
    """The result of a reduction over an empty dim. Raises ValueError where there is none."""
    kind, dtype = c.type().dtype, numeric(c.type().dtype)
    if c.op_type in _EMPTY:
        number = np.array(_EMPTY[c.op_type], dtype)
    elif c.op_type in ("ReduceLogSum", "ReduceLogSumExp") or (
        c.op_type == "ReduceMax" and c.type().is_floating
    ):
        number = np.array(-np.inf, dtype)
    elif c.op_type == "ReduceMin" and c.type().is_floating:
        number = np.array(np.inf, dtype)
    elif kind == DType.BOOL:
        number = np.array(c.op_type == "ReduceMin")
    else:
        raise ValueError(f"{c.op_type} of an empty tensor is not defined")
    keep = c.attr("keepdims", 1)
    shape = tuple(1 if d in dims else n for d, n in enumerate(c.shape()) if keep or d not in dims)
    return c.b.expand(c.b.const(number), shape)


@decomposition("CumSum")
def _cumsum(c: NodeCall) -> Results:
    axis = np.array(c.ints(1)[0], np.int64)
    return c.b.CumSum(c.x(), axis, **c.given)


@decomposition("CumProd")
def _cumprod(c: NodeCall) -> Results:
    """CumProd by doubling: in each round, elements are multiplied by those 1, 2, 4, ... before
    them."""
    b, axis, x = c.b, c.ints(1)[0] % c.rank(), c.x()
    size = c.sizes()[axis]
    require_few(size)
    back = np.arange(size - 1, -1, -1, dtype=np.int64)
    if c.attr("reverse", 0):
        x = b.Gather(x, back, axis=axis)
    if c.attr("exclusive", 0):
        x = _after_ones(c, x, axis, 1, size)
    step = 1
    while step < size:
        x = b.Mul(x, _after_ones(c, x, axis, step, size))
        step *= 2
    return b.Gather(x, back, axis=axis) if c.attr("reverse", 0) else x


def _after_ones(c: NodeCall, x: Value, axis: int, count: int, size: int) -> Value:
    ones = list(c.shape())
    ones[axis] = count
    return c.b.Concat(
        c.b.full(1, c.type().with_shape(ones)), c.b.slice(x, axis, 0, size - count), axis=axis
    )
