"""Order statistics: medians, k-th values, quantiles.

Of equal elements torch returns the index of any one, which gets the gradient (torch.median's page:
"do not expect the same result when run on CPU and GPU"). Here it is the one in a stable order.
"""

from __future__ import annotations

import math
from typing import Any

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.copies import stop_gradient
from onward.capture.aten.indexing import inverse
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Type, product


def _places(c: AtenCall, x: Value) -> list[Value]:
    """Returns x f[*,N] in ascending order with NaNs last, and the index of each, i64[*,N]."""
    made = c.b.TopK(x, c.b.size(type_of(x).shape[-1]), axis=-1, largest=0, sorted=1)
    return list(made)


def _last(c: AtenCall, x: Value, dim: int) -> Value:
    """Returns x with a dim moved to the end."""
    rank = type_of(x).rank
    return c.b.transpose(x, [*(d for d in range(rank) if d != dim % rank), dim % rank])


def _back(c: AtenCall, y: Value, dim: int, keepdim: bool) -> Value:
    """Returns y f[*,1] with its last dim moved back to `dim`, or without it."""
    rank = type_of(y).rank
    if not keepdim:
        return c.b.squeeze(y, [rank - 1])
    order = [*(d for d in range(rank) if d != dim % rank), dim % rank]
    return c.b.transpose(y, inverse(order))


def _rows(c: AtenCall, x: Value) -> tuple[int, ...]:
    return (*type_of(x).shape[:-1], 1)  # type: ignore[return-value]


def _middle(c: AtenCall, x: Value, skip: bool) -> Value:
    """x f[*,N] -> i64[*,1]: the index of the median, the lower one of two. In a row with NaNs it is
    that of the first NaN, or with `skip` the median of the numbers."""
    size = c.value(type_of(x).shape[-1], DType.INT64)
    one, two = c.b.scalar(1, DType.INT64), c.b.scalar(2, DType.INT64)
    _, places = _places(c, x)
    if not type_of(x).is_floating:
        at = c.b.expand(c.b.Div(c.b.Sub(size, one), two), _rows(c, x))
        return c.b.GatherElements(places, at, axis=type_of(x).rank - 1)
    odd = c.b.cast(c.b.IsNaN(x), DType.INT64)
    without = c.b.reduce_sum(odd, [type_of(x).rank - 1], keepdims=True)
    count = c.b.Sub(size, without) if skip else c.b.expand(size, _rows(c, x))
    at = c.b.Div(c.b.Max(c.b.Sub(count, one), c.b.scalar(0, DType.INT64)), two)
    found = c.b.GatherElements(places, at, axis=type_of(x).rank - 1)
    if skip:
        return found
    first = c.b.ArgMax(odd, axis=-1, keepdims=1)
    return c.b.Where(c.b.Greater(without, c.b.scalar(0, DType.INT64)), first, found)


def _median(c: AtenCall, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    if not type_of(x).rank:
        return [x, c.b.full(0, Type(DType.INT64, ()))]
    x = _last(c, x, dim)
    place = _middle(c, x, _skips(c))
    found = [c.b.GatherElements(x, place, axis=type_of(x).rank - 1), place]
    return [_back(c, y, dim, keepdim) for y in found]


def _median_of_all(c: AtenCall, x: Value) -> Value:
    """The median of all elements; those that are equal to it share its gradient."""
    flat = c.b.reshape(x, (product(type_of(x).shape),))
    middle = c.b.GatherElements(flat, _middle(c, flat, _skips(c)), axis=0)
    if not type_of(x).is_floating:
        return c.b.reshape(middle, ())
    middle = stop_gradient(c.b, middle)
    alike = c.b.Or(c.b.Equal(flat, middle), c.b.And(c.b.IsNaN(flat), c.b.IsNaN(middle)))
    least = c.b.scalar(-math.inf, type_of(x).dtype)
    return c.b.ReduceMax(c.b.Where(alike, flat, least), c.b.ints([0]), keepdims=0)


def _skips(c: AtenCall) -> bool:
    return "nan" in str(c.node.target)


def _kth_value(c: AtenCall, x: Value, k: Any, dim: int = -1, keepdim: bool = False) -> list[Value]:
    if not type_of(x).rank:
        return [x, c.b.full(0, Type(DType.INT64, ()))]
    if not type_of(x).is_floating:
        raise CaptureError(
            "kthvalue of integers has no translation, since PyTorch leaves open which of "
            "equal values it indexes; fix: x.sort(stable=True), and take the k-th"
        )
    x = _last(c, x, dim)
    last = type_of(x).rank - 1
    place = c.b.slice(_places(c, x)[1], last, k - 1, k)
    found = [c.b.GatherElements(x, place, axis=last), place]
    return [_back(c, y, dim, keepdim) for y in found]


def _quantile(
    c: AtenCall, x: Value, q: Any, dim: int | None = None, keepdim: bool = False, *,
    interpolation: str = "linear",
) -> Value:  # fmt: skip
    """Quantiles of x for q f[] or f[Q]; the dim Q comes first in the result."""
    shape, dtype = type_of(x).shape, type_of(x).dtype
    rank = len(shape)
    several = isinstance(q, Value) and type_of(q).rank == 1
    whole = dim is None or not rank
    dim = 0 if dim is None or not rank else dim % rank
    rows = c.b.reshape(x, (product(shape),)) if whole else _last(c, x, dim)
    last = type_of(rows).rank - 1
    place = _places(c, rows)[1]
    ordered = c.b.GatherElements(rows, place, axis=last)
    number = c.b.reshape(c.value(q, dtype), (type_of(q).shape[0] if several else 1,))
    at = _at(c, rows, number)  # f[*,Q]
    at = c.b.Round(at) if interpolation == "nearest" else at
    low, high = c.b.Floor(at), c.b.Ceil(at)
    if interpolation in ("lower", "nearest"):
        y = _taken(c, ordered, low)
    elif interpolation == "higher":
        y = _taken(c, ordered, high)
    else:
        share = c.b.Sub(at, stop_gradient(c.b, low))
        if interpolation == "midpoint":
            share = c.b.full(0.5, type_of(at))
        y = _between(c, _taken(c, ordered, low), _taken(c, ordered, high), share)
    if several:
        y = c.b.transpose(y, [last, *range(last)])
        if not keepdim:
            return y
        if whole:
            return c.b.reshape(y, (type_of(y).shape[0], *[1] * rank))
        return c.b.unsqueeze(y, [1 + dim])
    if whole:
        return c.b.reshape(y, (1,) * rank if keepdim else ())
    return _back(c, y, dim, keepdim)


def _at(c: AtenCall, rows: Value, q: Value) -> Value:
    """rows f[*,N], q f[Q] -> f[*,Q]: the place of each quantile in a sorted row, fractions
    included; in a row with NaNs the last place, which holds a NaN."""
    dtype = type_of(rows).dtype
    last = type_of(rows).rank - 1
    odd = c.b.cast(c.b.IsNaN(rows), dtype)
    without = c.b.reduce_sum(odd, [last], keepdims=True)
    end = c.b.Sub(c.value(type_of(rows).shape[-1], dtype), c.b.scalar(1.0, dtype))
    zero = c.b.scalar(0.0, dtype)
    if _skips(c):
        return c.b.Mul(q, c.b.Max(c.b.Sub(end, without), zero))
    shape = (*type_of(rows).shape[:-1], type_of(q).shape[0])
    at = c.b.expand(c.b.Mul(q, end), shape)
    return c.b.Where(c.b.Greater(without, zero), end, at)


def _taken(c: AtenCall, ordered: Value, at: Value) -> Value:
    return c.b.GatherElements(ordered, c.b.cast(at, DType.INT64), axis=type_of(ordered).rank - 1)


def _between(c: AtenCall, low: Value, high: Value, share: Value) -> Value:
    """Interpolates as torch.lerp does, exactly at both ends."""
    one, half = (c.b.scalar(n, type_of(share).dtype) for n in (1.0, 0.5))
    apart = c.b.Sub(high, low)
    near = c.b.Add(low, c.b.Mul(share, apart))
    far = c.b.Sub(high, c.b.Mul(apart, c.b.Sub(one, share)))
    return c.b.Where(c.b.Less(share, half), near, far)


TABLE = table(
    {
        _median: "median.dim nanmedian.dim",
        _median_of_all: "median.default nanmedian.default",
        _kth_value: "kthvalue.default",
        _quantile: "quantile.default quantile.scalar nanquantile.default nanquantile.scalar",
    }
)
