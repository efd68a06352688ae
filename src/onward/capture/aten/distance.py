"""Norms of any order, and distances between rows. Gradients at 0 are 0, as in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.copies import stop_gradient
from onward.capture.aten.reduce import dims_of, reduce_to, root
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of


def _vector_norm(
    c: AtenCall, x: Value, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    x = c.value(x, c.type.dtype)
    if order != 2:
        return _norm(c, x, order, dims_of(x, dims), keepdim)
    total = _summed(c, c.b.Mul(x, x), dims_of(x, dims), keepdim)
    # in PyTorch the gradient of a norm of zeros is 0 times the cotangent (NaN if that is infinite),
    # but that of a distance of 0 is always 0
    return c.b.Where(c.b.Equal(total, 0.0), c.b.Mul(total, 0.0), root(c, total))


def _norm(c: AtenCall, x: Value, order: float, dims: list[int], keepdim: bool) -> Value:
    """`(sum |x|^p)^(1/p)` for order p; the number of nonzero elements for order 0."""
    dtype = type_of(x).dtype
    zero, one = c.b.scalar(0.0, dtype), c.b.scalar(1.0, dtype)
    if order in (math.inf, -math.inf):
        op_type = "ReduceMax" if order > 0 else "ReduceMin"
        return reduce_to(c, op_type, c.b.Abs(x), dims, keepdim)
    none = c.b.Equal(x, zero)
    if order == 0:
        return _summed(c, c.b.Where(none, zero, one), dims, keepdim)
    if order == 1:
        return _summed(c, c.b.Abs(x), dims, keepdim)
    if order == 2:
        return root(c, _summed(c, c.b.Mul(x, x), dims, keepdim))
    power = c.b.Pow(c.b.Where(none, one, c.b.Abs(x)), c.b.scalar(order, dtype))
    power = c.b.Where(none, zero if order > 0 else c.b.scalar(math.inf, dtype), power)
    total = _summed(c, power, dims, keepdim)
    flat = c.b.Equal(total, zero)
    found = c.b.Pow(c.b.Where(flat, one, total), c.b.scalar(1 / order, dtype))
    return c.b.Where(flat, zero if order > 0 else c.b.scalar(math.inf, dtype), found)


def _summed(c: AtenCall, x: Value, dims: list[int], keepdim: bool) -> Value:
    return reduce_to(c, "ReduceSum", x, dims, keepdim) if dims else x


def _cdist(c: AtenCall, a: Value, b: Value, p: float, _: int | None = None) -> Value:
    """a f[*S,M,D], b f[*S,N,D] -> distances f[*S,M,N]."""
    rank = type_of(a).rank
    off = c.b.Sub(c.b.unsqueeze(a, [rank - 1]), c.b.unsqueeze(b, [rank - 2]))
    return _distance(c, off, float(p))


def _pdist(c: AtenCall, x: Value, p: float = 2.0) -> Value:
    """x f[N,D] -> the distances of each row to all later ones, f[N*(N-1)/2]."""
    count = type_of(x).shape[0]
    if not isinstance(count, int):
        raise CaptureError(
            "torch.pdist over a batch dim of open size has no translation; fix: torch.cdist(x, x)"
        )
    first, second = np.triu_indices(count, 1)
    rows = [c.b.Gather(x, c.b.const(i.astype(np.int64)), axis=0) for i in (first, second)]
    return _distance(c, c.b.Sub(*rows), float(p))


def _distance(c: AtenCall, off: Value, p: float) -> Value:
    """off f[*,D] -> the p-norm of differences, f[*]. With p = inf each difference that equals the
    largest gets the whole gradient, as in torch's kernels; in a norm they share it."""
    last = type_of(off).rank - 1
    if type_of(off).shape[last] == 0:
        return c.b.full(0.0, c.type)
    if p != math.inf:
        return _norm(c, off, p, [last], keepdim=False)
    dtype, size = type_of(off).dtype, c.b.Abs(off)
    most = reduce_to(c, "ReduceMax", size, [last], keepdim=True)
    ones = c.b.cast(c.b.Equal(size, most), dtype)
    several = c.b.Greater(reduce_to(c, "ReduceSum", ones, [last], keepdim=True), 1.0)
    equal = c.b.And(c.b.Equal(size, most), several)
    nothing = c.b.Sub(size, stop_gradient(c.b, size))
    more = reduce_to(c, "ReduceSum", c.b.Where(equal, nothing, 0.0), [last], keepdim=True)
    shared = c.b.Add(stop_gradient(c.b, most), more)
    return c.b.squeeze(c.b.Where(several, shared, most), [last])


TABLE = table(
    {
        _vector_norm: "linalg_vector_norm.default",
        _cdist: "_cdist_forward.default",
        _pdist: "_pdist_forward.default",
    }
)
