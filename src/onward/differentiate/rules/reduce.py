"""Gradients of reductions, cumulative sums and softmax."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.ops.reduce import reduced_dims
from onward.graph.types import product


def _spread(b: Builder, dy: Value, x: Value, dims: list[int], keep: int) -> Value:
    """Reshapes dy so that reduced dims have size 1 again."""
    shape = tuple(1 if i in dims else s for i, s in enumerate(type_of(x).shape))
    return dy if keep else b.reshape(dy, shape)


@rule("ReduceSum")
def _reduce_sum(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x = xs[0]
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    dy = _spread(b, only(dys), x, dims, attrs.get("keepdims", 1))
    return [b.expand(dy, type_of(x).shape), None]


@rule("ReduceMean")
def _reduce_mean(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x, dtype = xs[0], type_of(xs[0]).dtype
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    dy = _spread(b, only(dys), x, dims, attrs.get("keepdims", 1))
    count = product(type_of(x).shape[d] for d in dims)
    if isinstance(count, int):
        dy = b.Div(dy, float(count))
    else:
        dy = b.Div(dy, b.cast(b.squeeze(b.size(count), [0]), dtype))
    return [b.expand(dy, type_of(x).shape), None]


@rule("ReduceMax", "ReduceMin")
def _reduce_max(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of ReduceMax or ReduceMin: ties share it evenly, as in `torch.amax`."""
    x, keep = xs[0], attrs.get("keepdims", 1)
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    best, dy = _spread(b, ys[0], x, dims, keep), _spread(b, only(dys), x, dims, keep)
    hit = b.cast(b.Equal(x, best), type_of(x).dtype)
    share = b.Div(dy, b.reduce_sum(hit, dims, keepdims=True))
    return [b.Mul(hit, share), None]


@rule("ReduceSumSquare")
def _sum_square(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x = xs[0]
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    dy = _spread(b, only(dys), x, dims, attrs.get("keepdims", 1))
    return [b.Mul(dy, b.Mul(x, 2.0)), None]


@rule("ReduceL2")
def _l2(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of the 2-norm: `dx = dy x / y`, and 0 where the norm is 0, as in
    `torch.linalg.vector_norm`."""
    x, keep = xs[0], attrs.get("keepdims", 1)
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    y, dy = _spread(b, ys[0], x, dims, keep), _spread(b, only(dys), x, dims, keep)
    zero, one = (b.scalar(n, type_of(x).dtype) for n in (0.0, 1.0))
    none = b.Equal(y, zero)
    return [b.Mul(dy, b.Where(none, zero, b.Div(x, b.Where(none, one, y)))), None]


@rule("ReduceProd")
def _prod(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of a product: `dx = dy` times the product of the other factors, which is `y / x`
    if no factor is 0."""
    x, keep, dtype = xs[0], attrs.get("keepdims", 1), type_of(xs[0]).dtype
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    dy = _spread(b, only(dys), x, dims, keep)
    zero, one = (b.scalar(n, dtype) for n in (0.0, 1.0))
    empty = b.Equal(x, zero)
    filled = b.Where(empty, one, x)
    rest = b.node("ReduceProd", [filled, *xs[1:]], {**attrs, "keepdims": 1})
    zeros = b.reduce_sum(b.cast(empty, dtype), dims, keepdims=True)
    among = b.Where(b.Equal(zeros, zero), b.Div(rest, filled), zero)
    alone = b.Where(b.Equal(zeros, one), rest, zero)
    return [b.Mul(dy, b.Where(empty, alone, among)), None]


@rule("CumSum")
def _cumsum(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    reverse = 1 - attrs.get("reverse", 0)
    return [b.CumSum(only(dys), xs[1], **{**attrs, "reverse": reverse}), None]


@rule("Softmax")
def _softmax(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of Softmax: `dx = y (dy - sum(dy y))`, over the dim of the softmax."""
    dy, y = only(dys), ys[0]
    dims = [attrs.get("axis", -1) % type_of(y).rank]
    inner = b.reduce_sum(b.Mul(dy, y), dims, keepdims=True)
    return [b.Mul(b.Sub(dy, inner), y)]


@rule("LogSoftmax")
def _log_softmax(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of LogSoftmax: `dx = dy - exp(y) sum(dy)`, over the dim of the softmax."""
    dy, y = only(dys), ys[0]
    total = b.reduce_sum(dy, [attrs.get("axis", -1) % type_of(y).rank], keepdims=True)
    return [b.Sub(dy, b.Mul(b.Exp(y), total))]
