"""The table of gradient rules: one per ONNX op, written in the builder's language.

A rule takes `(b, dys, ys, xs, attrs)`: the gradients of the outputs (None where nothing flows),
the outputs, the inputs, the attributes; it returns one gradient or None per input. Most ops have
one output and are written `(b, dy, y, *xs)`. Rules ignore broadcasting: the walk undoes it.
Ops without a gradient are listed, not absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Value, array_of, content_of, type_of
from onward.graph.ops import OPS
from onward.graph.ops.flash import mask_gradient
from onward.graph.ops.reduce import reduced_dims
from onward.graph.ops.shape import clamp_slice
from onward.graph.registry import enter
from onward.graph.types import Size, product

Gradients: TypeAlias = Sequence[Value | None]
Rule: TypeAlias = Callable[
    [Builder, list[Value | None], list[Value], list[Value | None], dict[str, Any]], Gradients
]
RULES: dict[str, Rule] = {}

NO_GRADIENT = frozenset(
    {
        "Shape", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor",
        "Not", "ArgMax", "Range", "Floor", "Ceil", "Sign", "IsNaN", "IsInf", "BitwiseXor",
        "BitwiseAnd", "BitShift", "BitwiseNot", "ConstantOfShape", "OneHot", "Mod", "NonZero",
        "Rows", "AllFinite",
    }
)  # fmt: skip


def register(op_type: str, rule: Rule) -> None:
    """Enters the rule of an op. Raises ValueError where the op has one, or none on purpose, and
    where no op has this name."""
    if op_type not in OPS:
        raise ValueError(f"no op is called {op_type}; fix: register the op first")
    if op_type in NO_GRADIENT:
        raise ValueError(f"the op {op_type} has no gradient, on purpose; fix: an op of your own")
    enter(RULES, "gradient rule of", op_type, rule)


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """A rule of the full form, for ops with several outputs or with attributes."""

    def decorate(function: Rule) -> Rule:
        for op_type in op_types:
            register(op_type, function)
        return function

    return decorate


def unary(op_type: str, function: Callable[[Builder, Value, Value, Value], Value]) -> None:
    """`dx` of an elementwise op from `(b, dy, y, x)`."""

    def full(
        b: Builder,
        dys: list[Value | None],
        ys: list[Value],
        xs: list[Value | None],
        attrs: dict[str, Any],
    ) -> Gradients:
        assert dys[0] is not None and xs[0] is not None
        return [function(b, dys[0], ys[0], xs[0])]

    register(op_type, full)


def binary(
    op_type: str, function: Callable[[Builder, Value, Value, Value, Value], Gradients]
) -> None:
    """`(da, db)` of an elementwise op from `(b, dy, y, a, b)`."""

    def full(
        b: Builder,
        dys: list[Value | None],
        ys: list[Value],
        xs: list[Value | None],
        attrs: dict[str, Any],
    ) -> Gradients:
        if len(xs) != 2:
            raise ValueError(f"{op_type} of {len(xs)} inputs has no gradient rule")
        assert dys[0] is not None and xs[0] is not None and xs[1] is not None
        return function(b, dys[0], ys[0], xs[0], xs[1])

    register(op_type, full)


def _only(dys: list[Value | None]) -> Value:
    assert dys[0] is not None and all(dy is None for dy in dys[1:])
    return dys[0]


# ---- elementwise

unary("Identity", lambda b, dy, y, x: dy)
unary("Neg", lambda b, dy, y, x: b.Neg(dy))
unary("Abs", lambda b, dy, y, x: b.Mul(dy, b.Sign(x)))
unary("Sqrt", lambda b, dy, y, x: b.Mul(b.Div(dy, y), 0.5))
unary("Exp", lambda b, dy, y, x: b.Mul(dy, y))
unary("Log", lambda b, dy, y, x: b.Div(dy, x))
unary("Sin", lambda b, dy, y, x: b.Mul(dy, b.Cos(x)))
unary("Cos", lambda b, dy, y, x: b.Neg(b.Mul(dy, b.Sin(x))))
unary("Tanh", lambda b, dy, y, x: b.Mul(dy, b.Sub(1.0, b.Mul(y, y))))
unary("Sigmoid", lambda b, dy, y, x: b.Mul(dy, b.Mul(y, b.Sub(1.0, y))))
unary("Relu", lambda b, dy, y, x: b.Where(b.Greater(y, 0.0), dy, b.scalar(0.0, type_of(x).dtype)))
unary("Reciprocal", lambda b, dy, y, x: b.Neg(b.Mul(dy, b.Mul(y, y))))
unary(
    "Erf", lambda b, dy, y, x: b.Mul(dy, b.Mul(b.Exp(b.Neg(b.Mul(x, x))), 2 / math.sqrt(math.pi)))
)
unary("Cast", lambda b, dy, y, x: b.cast(dy, type_of(x).dtype))
unary("Reshape", lambda b, dy, y, x: b.reshape(dy, type_of(x).shape))
unary("Squeeze", lambda b, dy, y, x: b.reshape(dy, type_of(x).shape))
unary("Unsqueeze", lambda b, dy, y, x: b.reshape(dy, type_of(x).shape))
unary("Expand", lambda b, dy, y, x: dy)  # the walk sums it back

binary("Add", lambda b, dy, y, a, c: (dy, dy))
binary("Sub", lambda b, dy, y, a, c: (dy, b.Neg(dy)))
binary("Mul", lambda b, dy, y, a, c: (b.Mul(dy, c), b.Mul(dy, a)))
binary("Div", lambda b, dy, y, a, c: (b.Div(dy, c), b.Neg(b.Div(b.Mul(dy, y), c))))


def _pow(b: Builder, dy: Value, y: Value, x: Value, n: Value) -> Gradients:
    """`n x^(n-1)`; the exponent's gradient `y log x` only where it is not a constant."""
    exponent = array_of(n)
    if exponent is not None and exponent.size == 1:
        e = float(exponent.reshape(-1)[0])
        if e == 0:
            return (None, None)  # not 0 * x^-1, which is NaN at 0
        slope = b.Mul(b.Pow(x, b.scalar(e - 1, type_of(x).dtype)), e)
        return (b.Mul(dy, slope), None)
    zero = b.scalar(0.0, type_of(x).dtype)  # as PyTorch where a factor is 0 and the other infinite
    slope = b.Where(b.Equal(n, 0.0), zero, b.Mul(n, b.Pow(x, b.Sub(n, 1.0))))
    power = b.Where(b.Equal(x, 0.0), zero, b.Mul(y, b.Log(x)))
    return (b.Mul(dy, slope), b.Mul(dy, power))


binary("Pow", _pow)


def _winner(op_type: str) -> Callable[[Builder, Value, Value, Value, Value], Gradients]:
    """Max and Min: ties share the gradient, as in PyTorch."""

    def full(b: Builder, dy: Value, y: Value, a: Value, c: Value) -> Gradients:
        half, zero = b.Mul(dy, 0.5), b.scalar(0.0, type_of(dy).dtype)
        tie = b.Equal(a, c)
        a_wins = b.Greater(a, c) if op_type == "Max" else b.Less(a, c)
        da = b.Where(tie, half, b.Where(a_wins, dy, zero))
        return (da, b.Sub(dy, da))

    return full


binary("Max", _winner("Max"))
binary("Min", _winner("Min"))


@rule("Gelu")
def _gelu(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return [b.GeluGrad(_only(dys), xs[0], approximate=attrs.get("approximate", "none"))]


@rule("BiasActivation")
def _bias_activation(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """Relu's slope shows in y, which the next product keeps: x is then free once y is written."""
    if attrs["activation"] == "relu":
        return b.BiasActivationGrad(_only(dys), ys[0], **attrs)
    return b.BiasActivationGrad(_only(dys), xs[0], xs[1], **attrs)


@rule("Where")
def _where(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dy = _only(dys)
    zero = b.scalar(0.0, type_of(dy).dtype)
    return [None, b.Where(xs[0], dy, zero), b.Where(xs[0], zero, dy)]


@rule("Dropout")
def _dropout(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """Linear with a mask that is a function of coordinates: the same node applied to dy."""
    return [b.Dropout(_only(dys), *xs[1:], **attrs)]


# ---- shapes


@rule("Transpose")
def _transpose(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    perm = attrs.get("perm") or list(reversed(range(type_of(xs[0]).rank)))
    return [b.transpose(_only(dys), [perm.index(i) for i in range(len(perm))])]


@rule("Concat")
def _concat(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dim = attrs["axis"] % type_of(ys[0]).rank
    if len(xs) == 1:
        return [_only(dys)]
    return b.Split(_only(dys), b.sizes([type_of(x).shape[dim] for x in xs]), axis=dim)


@rule("Split")
def _split(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    parts = [
        dy if dy is not None else b.full(0.0, type_of(y)) for dy, y in zip(dys, ys, strict=True)
    ]
    return [b.Concat(*parts, axis=attrs.get("axis", 0) % type_of(xs[0]).rank), None]


@rule("Slice")
def _slice(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """Zeros around dy. Pads are written for every dim: an engine was seen to ignore Pad's axes."""
    dy, shape = _only(dys), type_of(xs[0]).shape
    before: list[Size] = [0] * len(shape)
    after: list[Size] = [0] * len(shape)
    starts, ends = content_of(xs[1]) or (), content_of(xs[2]) or ()
    axes = content_of(xs[3]) if len(xs) > 3 else None
    dims = [d % len(shape) for d in axes or range(len(starts))]  # type: ignore[operator]
    for dim, start, end in zip(dims, starts, ends, strict=True):
        first, last = clamp_slice(start, end, shape[dim])
        before[dim], after[dim] = first, shape[dim] - last
    return [b.Pad(dy, b.sizes([*before, *after]), 0.0), None, None, None, None]


@rule("Pad")
def _pad(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dx, shape = _only(dys), type_of(xs[0]).shape
    pads = content_of(xs[1]) or ()
    for dim, size in enumerate(shape):
        if pads[dim] != 0 or pads[dim + len(shape)] != 0:
            dx = b.slice(dx, dim, pads[dim], pads[dim] + size)
    return [dx, None, None]


@rule("Trilu")
def _trilu(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return [b.Trilu(_only(dys), *xs[1:], **attrs), None]


# ---- indexing


def _rows_added(b: Builder, weight: Value, ids: Value, dy: Value) -> Value:
    """Zeros like `weight f[V,*S]` with the rows of dy added at `ids`."""
    count = product(type_of(ids).shape)
    index = b.reshape(ids, (count, 1))
    rows = b.reshape(dy, (count, *type_of(weight).shape[1:]))
    zeros = b.full(0.0, type_of(weight))
    return b.ScatterND(zeros, index, rows, reduction="add")


@rule("Gather")
def _gather(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x, ids = xs
    dy, rank, dim = _only(dys), type_of(x).rank, attrs.get("axis", 0) % type_of(x).rank
    if dim == 0:
        return [_rows_added(b, x, ids, dy), None]
    # move the gathered dim to the front, scatter rows, move it back
    k = type_of(ids).rank
    front = [*range(dim, dim + k), *range(dim), *range(dim + k, rank - 1 + k)]
    order = [dim, *range(dim), *range(dim + 1, rank)]
    rows = _rows_added(b, b.transpose(x, order), ids, b.transpose(dy, front))
    return [b.transpose(rows, [order.index(i) for i in range(rank)]), None]


@rule("Embedding")
def _embedding(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """As Gather, except that the padding row takes no gradient."""
    weight, ids = xs
    padding = b.Equal(ids, np.array(attrs["padding_idx"], dtype=np.int64))
    mask = b.unsqueeze(padding, [type_of(ids).rank])
    dy = b.Where(mask, b.scalar(0.0, type_of(weight).dtype), _only(dys))
    return [_rows_added(b, weight, ids, dy), None]


@rule("GatherElements")
def _gather_elements(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    zeros = b.full(0.0, type_of(xs[0]))
    return [
        b.ScatterElements(zeros, xs[1], _only(dys), axis=attrs.get("axis", 0), reduction="add"),
        None,
    ]


@rule("GatherND")
def _gather_nd(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    if attrs.get("batch_dims", 0):
        raise ValueError("batch_dims has no gradient rule")
    zeros = b.full(0.0, type_of(xs[0]))
    return [b.ScatterND(zeros, xs[1], _only(dys), reduction="add"), None]


@rule("ScatterND")
def _scatter_nd(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """Rows that are added take the gradient of where they went."""
    if attrs.get("reduction", "none") != "add":
        raise ValueError("rows that replace others have no gradient rule")
    return [_only(dys), None, b.GatherND(_only(dys), xs[1])]


# ---- reductions


def _spread(b: Builder, dy: Value, x: Value, dims: list[int], keep: int) -> Value:
    """dy with the reduced dims back as 1."""
    shape = tuple(1 if i in dims else s for i, s in enumerate(type_of(x).shape))
    return dy if keep else b.reshape(dy, shape)


@rule("ReduceSum")
def _reduce_sum(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x = xs[0]
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    dy = _spread(b, _only(dys), x, dims, attrs.get("keepdims", 1))
    return [b.expand(dy, type_of(x).shape), None]


@rule("ReduceMean")
def _reduce_mean(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x, dtype = xs[0], type_of(xs[0]).dtype
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    dy = _spread(b, _only(dys), x, dims, attrs.get("keepdims", 1))
    count = product(type_of(x).shape[d] for d in dims)
    if isinstance(count, int):
        dy = b.Div(dy, float(count))
    else:
        dy = b.Div(dy, b.cast(b.squeeze(b.size(count), [0]), dtype))
    return [b.expand(dy, type_of(x).shape), None]


@rule("ReduceMax", "ReduceMin")
def _reduce_max(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """Ties share the gradient evenly, as `torch.amax`."""
    x, keep = xs[0], attrs.get("keepdims", 1)
    dims = reduced_dims(xs[1] if len(xs) > 1 else None, attrs, type_of(x).rank)
    best, dy = _spread(b, ys[0], x, dims, keep), _spread(b, _only(dys), x, dims, keep)
    hit = b.cast(b.Equal(x, best), type_of(x).dtype)
    share = b.Div(dy, b.reduce_sum(hit, dims, keepdims=True))
    return [b.Mul(hit, share), None]


@rule("CumSum")
def _cumsum(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    reverse = 1 - attrs.get("reverse", 0)
    return [b.CumSum(_only(dys), xs[1], **{**attrs, "reverse": reverse}), None]


# ---- products


@rule("MatMul")
def _matmul(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """`da = dy b^T`, `db = a^T dy` over the two last dims."""
    dy, (x, w) = _only(dys), xs

    def turned(v: Value) -> Value:
        rank = type_of(v).rank
        return b.transpose(v, [*range(rank - 2), rank - 1, rank - 2])

    return [b.MatMul(dy, turned(w)), b.MatMul(turned(x), dy)]


@rule("Gemm")
def _gemm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """`y = alpha a' b' + beta c` where `'` is transA, transB."""
    dy, (x, w) = _only(dys), xs[:2]
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    dc = dy if beta == 1.0 else b.Mul(dy, beta)
    dy = dy if alpha == 1.0 else b.Mul(dy, alpha)
    ta, tb = attrs.get("transA", 0), attrs.get("transB", 0)
    dx = b.Gemm(w, dy, transA=tb, transB=1) if ta else b.Gemm(dy, w, transB=1 - tb)
    dw = b.Gemm(dy, x, transA=1, transB=ta) if tb else b.Gemm(x, dy, transA=1 - ta)
    return [dx, dw, dc]


# ---- composites


@rule("Softmax")
def _softmax(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """`dx = y (dy - sum(dy y))`, over the dim of the softmax."""
    dy, y = _only(dys), ys[0]
    dims = [attrs.get("axis", -1) % type_of(y).rank]
    inner = b.reduce_sum(b.Mul(dy, y), dims, keepdims=True)
    return [b.Mul(b.Sub(dy, inner), y)]


@rule("LogSoftmax")
def _log_softmax(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """`dx = dy - exp(y) sum(dy)`, over the dim of the softmax."""
    dy, y = _only(dys), ys[0]
    total = b.reduce_sum(dy, [attrs.get("axis", -1) % type_of(y).rank], keepdims=True)
    return [b.Sub(dy, b.Mul(b.Exp(y), total))]


@rule("LayerNormalization")
def _layer_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dim = attrs.get("axis", -1)
    return b.LayerNormalizationGrad(_only(dys), xs[0], xs[1], ys[1], ys[2], axis=dim)


@rule("AddLayerNormalization")
def _add_layer_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient at the sum is the residual's; x gets it through the mask of its dropout."""
    dy, dmean, dinvstd, dr = dys
    assert dmean is None and dinvstd is None
    seeds = xs[4:]  # with offset and coordinates
    draw = {k: attrs[k] for k in ("ratio", "site", "sample_dim") if attrs.get("ratio", 0.0) > 0.0}
    if dy is None:  # only the sum is used
        return [b.Dropout(dr, *seeds, **draw) if draw else dr, dr]
    statistics = (ys[3], xs[2], ys[1], ys[2])
    if not draw:
        dresidual, dscale, dbias = b.AddLayerNormalizationGrad(dy, dr, *statistics)
        return [dresidual, dresidual, dscale, dbias]
    dresidual, dscale, dbias, dx = b.AddLayerNormalizationGrad(dy, dr, *statistics, *seeds, **draw)
    return [dx, dresidual, dscale, dbias]


@rule("FlashAttention")
def _flash_attention(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """An added mask's gradient is swept away again where nobody asked for it."""
    if dys[0] is None or dys[1] is not None or dys[2] is not None:
        raise ValueError("only its first output has a gradient")
    xs = [*xs, *[None] * (6 - len(xs))]
    inputs = [dys[0], *xs[:6], *ys, *xs[6:]]
    mask = xs[3]
    dmask = None
    if mask is not None and type_of(mask).is_floating:
        dmask = mask_gradient(b, inputs, attrs)
    return [*b.FlashAttentionGrad(*inputs, **attrs), dmask]


@rule("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
def _cross_entropy(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dx = b.SoftmaxCrossEntropyLossGrad(_only(dys), ys[1], *xs[1:], **attrs)
    return [dx, None, None]


@rule("LinearCrossEntropy")
def _linear_cross_entropy(
    b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]
) -> Gradients:
    dx, dw, *dbias = b.LinearCrossEntropyGrad(_only(dys), *xs, **attrs)
    return [dx, dw, *(dbias or [None]), None, None]


__all__ = ["NO_GRADIENT", "RULES", "Gradients", "Rule", "register"]
