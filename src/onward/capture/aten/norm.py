"""Normalisation: layer, group and batch norm and softmax as one node each; others by parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.copies import stop_gradient
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.ops.batch_norm import by_batch, run_on
from onward.graph.ops.group_norm import size_of_group
from onward.graph.types import DType, Shape, Size, Type, product


def _layer_norm(
    c: AtenCall, x: Value, shape: list[int], weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, *_: Any,
) -> Value:  # fmt: skip
    inner = Type(type_of(x).dtype, tuple(shape))
    scale = weight if weight is not None else _all(c, 1, inner)
    shift = bias if bias is not None else _all(c, 0, inner)
    return c.b.LayerNormalization(x, scale, shift, axis=-len(shape), epsilon=eps)[0]


def _all(c: AtenCall, number: float, type: Type) -> Value:
    sizes = [size for size in type.shape if isinstance(size, int)]
    if len(sizes) < len(type.shape):
        return c.b.full(number, type)
    return c.b.const(np.full(sizes, number, type.dtype.numpy()))


def _native_layer_norm(
    c: AtenCall, x: Value, shape: list[int], weight: Value | None, bias: Value | None, eps: float
) -> list[Value]:
    """Returns the result, the means and the inverse deviations; autograd gives the latter two no
    gradient."""
    y = _layer_norm(c, x, shape, weight, bias, eps)
    made = y.producer()
    assert made is not None
    return [y, *[stop_gradient(c.b, s) for s in made.outputs[1:]]]


def _softmax(c: AtenCall, x: Value, dim: int, *_: Any) -> Value:
    op_type = "LogSoftmax" if "log_softmax" in str(c.node.target) else "Softmax"
    x = c.value(x, c.type.dtype)
    rank = type_of(x).rank
    dim = dim % rank
    swap = [*(i for i in range(rank) if i != dim), dim]
    y = c.b.one(op_type, [c.b.transpose(x, swap)], {"axis": -1})
    back = [swap.index(i) for i in range(rank)]
    return c.b.transpose(y, back)


def _safe_softmax(c: AtenCall, x: Value, dim: int, *_: Any) -> Value:
    """Softmax that gives 0 for rows that are -inf throughout."""
    x = c.value(x, c.type.dtype)
    if not type_of(x).rank:
        x = c.b.unsqueeze(x, [0])
        return c.b.reshape(_safe_softmax(c, x, 0), ())
    zero = c.b.scalar(0.0, c.type.dtype)
    seen = c.b.cast(c.b.Not(c.b.Equal(x, -math.inf)), DType.INT64)
    hidden = c.b.ReduceMax(seen, c.b.ints([dim % type_of(x).rank]), keepdims=1)
    hidden = c.b.Equal(hidden, c.b.scalar(0, DType.INT64))
    y = _softmax(c, c.b.Where(hidden, zero, x), dim)
    return c.b.Where(hidden, zero, y)


def _channels(c: AtenCall, x: Value, v: Value) -> Value:
    """Returns v f[C] as f[C,1,...], to broadcast along dim 1 of x f[N,C,*S]."""
    return c.b.reshape(v, (*type_of(v).shape, *[1] * (type_of(x).rank - 2)))


def _scaled(c: AtenCall, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """Returns `weight x + bias`, with weight and bias f[C]."""
    x = x if weight is None else c.b.Mul(x, _channels(c, x, weight))
    return x if bias is None else c.b.Add(x, _channels(c, x, bias))


def _group_norm(
    c: AtenCall, x: Value, groups: Size, weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, *_: Any,
) -> Value:  # fmt: skip
    if not isinstance(groups, int):
        raise CaptureError(
            f"instance norm of {type_of(x)} needs a fixed number of channels; "
            "fix: keep the channel dim (dim 1) of a size that is the same for "
            "every batch"
        )
    return c.b.GroupNorm(x, weight, bias, groups=groups, epsilon=eps)[0]


def _native_group_norm(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, n: Size, channels: Size,
    inner: Size, groups: int, eps: float,
) -> list[Value]:  # fmt: skip
    """Returns the result, the means f[N,groups] and the inverse deviations f[N,groups], which have
    gradients."""
    y = _group_norm(c, x, groups, weight, bias, eps)
    rows: Shape = (n, groups)
    flat = c.b.reshape(x, (*rows, size_of_group(type_of(x), groups)))
    mean = c.b.ReduceMean(flat, c.b.ints([2]), keepdims=1)
    off = c.b.Sub(flat, mean)
    variance = c.b.ReduceMean(c.b.Mul(off, off), c.b.ints([2]), keepdims=0)
    deviation = c.b.Reciprocal(c.b.Sqrt(c.b.Add(variance, eps)))
    return [y, c.b.squeeze(mean, [2]), deviation]


def _by_running(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value,
    eps: float,
) -> Value:  # fmt: skip
    """Normalizes by running statistics f[C], folded into one factor and one addend per channel."""
    scale = c.b.Reciprocal(c.b.Sqrt(c.b.Add(variance, eps)))
    scale = scale if weight is None else c.b.Mul(scale, weight)
    shift = c.b.Mul(mean, scale)
    shift = c.b.Neg(shift) if bias is None else c.b.Sub(bias, shift)
    return _scaled(c, x, scale, shift)


def _batch_norm(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, mean: Value | None,
    variance: Value | None, training: bool, momentum: float, eps: float, *_: Any,
) -> Value:  # fmt: skip
    if not training:
        assert mean is not None and variance is not None
        return _by_running(c, x, weight, bias, mean, variance, eps)
    y, batch = _by_batch(c, x, weight, bias, eps)
    if mean is not None and variance is not None:
        sizes = type_of(x).shape
        _run_on(c, mean, variance, batch, (sizes[0], *sizes[2:]), momentum)
    return y


def _by_batch(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, list[Value]]:
    """Normalizes by the batch. Returns the result, and the batch's [mean, variance], each f[C]."""
    kind = Type(type_of(x).dtype, type_of(x).shape[1:2])
    scale = c.b.full(1.0, kind) if weight is None else weight
    shift = c.b.full(0.0, kind) if bias is None else bias
    y, *batch = by_batch(c.b, x, scale, shift, eps)
    return y, batch


def _run_on(
    c: AtenCall, mean: Value, variance: Value, batch: list[Value], sizes: Shape, momentum: float
) -> None:
    """Stores new running statistics f[C], moved towards those of the batch, with the unbiased
    variance. sizes: the dims that the batch's statistics are over."""
    dtype = type_of(batch[0]).dtype
    count = product(sizes)
    unbiased = c.b.Div(c.value(count, dtype), c.value(count - 1, dtype))
    pairs = [(mean, batch[0]), (variance, c.b.Mul(batch[1], unbiased))]
    for place, (running, now) in enumerate(pairs, 3):
        c.t.store(c, c.node.args[place], run_on(c.b, running, now, 1.0 - momentum, momentum))


def _legit(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value,
    training: bool, momentum: float, eps: float,
) -> list[Value]:  # fmt: skip
    """Returns batch norm's result; in training also the batch's mean and inverse deviation, f[C],
    without gradients."""
    if not training:
        return [_by_running(c, x, weight, bias, mean, variance, eps)]
    y, batch = _by_batch(c, x, weight, bias, eps)
    sizes = type_of(x).shape
    _run_on(c, mean, variance, batch, (sizes[0], *sizes[2:]), momentum)
    return [y, *_apart(c, batch, eps)]


def _legit_running(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, mean: Value, variance: Value,
    momentum: float, eps: float,
) -> list[Value]:  # fmt: skip
    return [_by_running(c, x, weight, bias, mean, variance, eps)]


def _legit_without(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, training: bool,
    momentum: float, eps: float,
) -> list[Value]:  # fmt: skip
    """Batch norm without running statistics: normalizes by the batch."""
    y, batch = _by_batch(c, x, weight, bias, eps)
    return [y, *_apart(c, batch, eps)]


def _apart(c: AtenCall, batch: list[Value], eps: float) -> list[Value]:
    deviation = c.b.Reciprocal(c.b.Sqrt(c.b.Add(batch[1], eps)))
    return [stop_gradient(c.b, v) for v in (batch[0], deviation)]


def _instance_norm(
    c: AtenCall, x: Value, weight: Value | None, bias: Value | None, mean: Value | None,
    variance: Value | None, by_input: bool, momentum: float, eps: float, *_: Any,
) -> Value:  # fmt: skip
    if by_input:
        if mean is not None and variance is not None:
            dims = list(range(2, type_of(x).rank))
            own = c.b.ReduceMean(x, c.b.ints(dims), keepdims=1)
            off = c.b.Sub(x, own)
            squares = c.b.ReduceMean(c.b.Mul(off, off), c.b.ints(dims), keepdims=1)
            over = c.b.ints([0, *dims])
            batch = [c.b.ReduceMean(s, over, keepdims=0) for s in (own, squares)]
            sizes = tuple([type_of(x).shape[d] for d in dims])
            _run_on(c, mean, variance, batch, sizes, momentum)
        return _group_norm(c, x, type_of(x).shape[1], weight, bias, eps)
    assert mean is not None and variance is not None
    return _by_running(c, x, weight, bias, mean, variance, eps)


def _rms_norm(
    c: AtenCall, x: Value, shape: list[int], weight: Value | None = None, eps: float | None = None
) -> Value:
    rank, dtype = type_of(x).rank, type_of(x).dtype
    eps = float(np.finfo(dtype.numpy()).eps) if eps is None else eps
    dims = c.b.ints(list(range(rank - len(shape), rank)))
    squares = c.b.ReduceMean(c.b.Mul(x, x), dims, keepdims=1)
    y = c.b.Mul(x, c.b.Reciprocal(c.b.Sqrt(c.b.Add(squares, eps))))
    return y if weight is None else c.b.Mul(y, weight)


def _weight_norm(c: AtenCall, v: Value, g: Value, dim: int = 0) -> Value:
    """`g v / |v|`, with the norm over all dims but `dim`; over all dims for -1."""
    rank = type_of(v).rank
    dims = [i for i in range(rank) if dim == -1 or i != dim % rank]
    squares = c.b.reduce_sum(c.b.Mul(v, v), dims, keepdims=dim != -1)
    return c.b.Mul(v, c.b.Div(g, c.b.Sqrt(squares)))


TABLE = table(
    {
        _layer_norm: "layer_norm.default",
        _native_layer_norm: "native_layer_norm.default",
        _group_norm: "group_norm.default",
        _native_group_norm: "native_group_norm.default",
        _batch_norm: "batch_norm.default",
        _legit: "_native_batch_norm_legit.default",
        _legit_running: "_native_batch_norm_legit_no_training.default",
        _legit_without: "_native_batch_norm_legit.no_stats",
        _instance_norm: "instance_norm.default",
        _rms_norm: "rms_norm.default",
        _weight_norm: "_weight_norm.default",
        _safe_softmax: "_safe_softmax.default",
        _softmax: "softmax.int _softmax.default log_softmax.int _log_softmax.default",
    }
)
