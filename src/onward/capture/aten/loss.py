"""Losses; cross entropy as one node."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.copies import stop_gradient
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Type, product

_IGNORED = -100  # PyTorch's default for the label that is ignored


def _cross_entropy(
    c: AtenCall, x: Value, labels: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: Any = _IGNORED, label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    if type_of(labels).is_floating:
        return _soft_cross_entropy(c, x, labels, weight, reduction, label_smoothing)
    if type_of(labels).dtype not in (DType.INT64, DType.UINT8):
        raise CaptureError(
            f"the labels are of {type_of(labels).dtype}, which PyTorch refuses; fix: labels.long()"
        )
    labels = c.b.cast(labels, DType.INT64)
    shape, rows = type_of(x).shape, type_of(labels).shape
    if len(shape) == 1:
        x = c.b.reshape(x, (1, *shape))
    elif len(shape) > 2:  # f[N,C,*S] -> f[N*S,C]
        for pair in zip(shape[2:], rows[1:], strict=True):
            if pair[0] != pair[1]:  # an export does not record that they are equal
                c.t.as_numbers(pair)
        x = c.b.transpose(x, [0, *range(2, len(shape)), 1])
        x = c.b.reshape(x, (product(rows), shape[1]))
    labels = c.b.reshape(labels, (product(rows),))
    if not isinstance(ignore_index, int):  # a size, as in question answering: T for "no answer"
        ignored = c.b.Equal(labels, c.value(ignore_index, type_of(labels).dtype))
        labels = c.b.Where(ignored, c.b.scalar(_IGNORED, type_of(labels).dtype), labels)
        ignore_index = _IGNORED
    inputs = [x, labels] if weight is None else [x, labels, weight]
    kind = {0: "none", 1: "mean", 2: "sum"}[reduction]
    attrs: dict[str, Any] = {"reduction": kind, "ignore_index": ignore_index}
    if label_smoothing:
        loss = c.b.CrossEntropyLoss(*inputs, **attrs, label_smoothing=float(label_smoothing))[0]
    else:
        loss = c.b.SoftmaxCrossEntropyLoss(*inputs, **attrs)[0]
    return c.b.reshape(loss, rows) if kind == "none" else loss


def _mse(c: AtenCall, x: Value, y: Value, reduction: int = 1) -> Value:
    d = c.b.Sub(x, y)
    return _reduce_loss(c, c.b.Mul(d, d), reduction)


def _soft_cross_entropy(
    c: AtenCall, x: Value, labels: Value, weight: Value | None, reduction: int, smoothing: float
) -> Value:
    """Cross entropy of x f[N,C,*S] with class probabilities of the same shape as labels."""
    type = type_of(x)
    dim = 0 if type.rank == 1 else 1
    order = [*(d for d in range(type.rank) if d != dim), dim]
    classes = c.value(type.shape[dim], type.dtype)
    if smoothing:
        share = c.b.Div(c.b.scalar(smoothing, type.dtype), classes)
        labels = c.b.Add(c.b.Mul(labels, 1 - smoothing), share)
    loss = c.b.Mul(c.b.LogSoftmax(c.b.transpose(x, order), axis=-1), c.b.transpose(labels, order))
    loss = c.b.Neg(loss if weight is None else c.b.Mul(loss, weight))
    if reduction == 0:
        return c.b.reduce_sum(loss, [type.rank - 1], keepdims=False)
    total = c.b.reduce_sum(loss, list(range(type.rank)), keepdims=False)
    if reduction == 2:
        return total
    rows = c.value(product(n for d, n in enumerate(type.shape) if d != dim), type.dtype)
    return c.b.Div(total, rows)


def _nll(
    c: AtenCall, x: Value, labels: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: int = _IGNORED,
) -> Value:  # fmt: skip
    """x (log probabilities) f[N,C,*S], labels i64[N,*S] -> the negative log likelihood."""
    dtype, dim = type_of(x).dtype, 0 if type_of(x).rank == 1 else 1
    if type_of(labels).dtype != DType.INT64:
        raise CaptureError("the labels are not of torch.int64; fix: labels.long()")
    zero = c.b.scalar(0, DType.INT64)
    ignored = c.b.Equal(labels, c.value(ignore_index, DType.INT64))
    safe = c.b.Where(ignored, zero, labels)
    found = c.b.GatherElements(x, c.b.unsqueeze(safe, [dim]), axis=dim)
    share = c.b.full(1.0, Type(dtype, type_of(labels).shape)) if weight is None else c.b.Gather(
        weight, safe, axis=0
    )  # fmt: skip
    share = c.b.Where(ignored, c.b.scalar(0.0, dtype), share)
    taken = c.b.Where(ignored, c.b.scalar(0.0, dtype), c.b.squeeze(found, [dim]))
    loss = c.b.Neg(c.b.Mul(taken, share))
    if reduction == 0:
        return loss
    dims = list(range(type_of(loss).rank))
    total = c.b.reduce_sum(loss, dims, keepdims=False)
    return total if reduction == 2 else c.b.Div(total, c.b.reduce_sum(share, dims, keepdims=False))


def _bce(
    c: AtenCall, x: Value, y: Value, weight: Value | None = None, pos_weight: Value | None = None,
    reduction: int = 1,
) -> Value:  # fmt: skip
    """`(1 - y) x + (1 + (p - 1) y) log(1 + exp(-x))`, as torch computes it."""
    soft = c.b.Softplus(c.b.Neg(x))
    if pos_weight is not None:
        soft = c.b.Mul(soft, c.b.Add(c.b.Mul(c.b.Sub(pos_weight, 1.0), y), 1.0))
    loss = c.b.Add(c.b.Mul(c.b.Sub(1.0, y), x), soft)
    return _reduce_loss(c, loss if weight is None else c.b.Mul(loss, weight), reduction)


def _bce_of_probabilities(
    c: AtenCall, x: Value, y: Value, weight: Value | None = None, reduction: int = 1
) -> Value:
    """`-(y log(x) + (1 - y) log(1 - x))` of probabilities x, with logarithms of -100 at least. Its
    gradient by x is `(x - y) / max(x (1 - x), 1e-12)`, as torch computes it, and so a number where
    a sigmoid has become 1."""
    b, dtype = c.b, type_of(x).dtype
    one, least = b.scalar(1.0, dtype), b.scalar(-100.0, dtype)
    given, label = stop_gradient(b, x), stop_gradient(b, y)
    logs = (b.Log(given), b.Log1p(b.Neg(given)))
    yes, no = (b.Where(b.Less(log, least), least, log) for log in logs)
    loss = b.Sub(b.Mul(b.Sub(y, one), no), b.Mul(y, yes))
    spread = b.Max(b.Mul(b.Sub(one, given), given), b.scalar(1e-12, dtype))
    slope = b.Div(b.Sub(given, label), spread)
    loss = b.Add(loss, b.Mul(slope, b.Sub(x, given)))
    return _reduce_loss(c, loss if weight is None else b.Mul(loss, weight), reduction)


def _reduce_loss(c: AtenCall, x: Value, reduction: int) -> Value:
    if reduction == 0:
        return x
    op_type = "ReduceMean" if reduction == 1 else "ReduceSum"
    dims = c.b.ints(range(type_of(x).rank))
    return c.b.one(op_type, [x, dims], {"keepdims": 0})


TABLE = table(
    {
        _cross_entropy: "cross_entropy_loss.default",
        _nll: "nll_loss_nd.default nll_loss.default nll_loss2d.default",
        _mse: "mse_loss.default",
        _bce: "binary_cross_entropy_with_logits.default",
        _bce_of_probabilities: "binary_cross_entropy.default",
    }
)
