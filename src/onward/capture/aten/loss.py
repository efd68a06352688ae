"""Losses; cross entropy is kept whole."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, product

_IGNORED = -100  # PyTorch's own default for a label that counts for nothing


def _cross_entropy(
    c: Call, x: Value, labels: Value, weight: Value | None = None, reduction: int = 1,
    ignore_index: Any = _IGNORED, label_smoothing: float = 0.0,
) -> Value:  # fmt: skip
    if type_of(labels).is_floating:
        raise CaptureError("cross entropy with class probabilities as labels")
    if type_of(labels).dtype not in (DType.INT64, DType.UINT8):
        raise CaptureError(
            f"labels of {type_of(labels).dtype}, which PyTorch refuses; fix: labels.long()"
        )
    labels = c.b.cast(labels, DType.INT64)
    shape, rows = type_of(x).shape, type_of(labels).shape
    if len(shape) == 1:
        x = c.b.reshape(x, (1, *shape))
    elif len(shape) > 2:  # f[N,C,*S] -> f[N*S,C]
        x = c.b.transpose(x, [0, *range(2, len(shape)), 1])
        x = c.b.reshape(x, (product(rows), shape[1]))
    labels = c.b.reshape(labels, (product(rows),))
    if not isinstance(ignore_index, int):  # a size: the number of tokens where none is the answer
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


def _mse(c: Call, x: Value, y: Value, reduction: int = 1) -> Value:
    d = c.b.Sub(x, y)
    return _reduce_loss(c, c.b.Mul(d, d), reduction)


def _bce(
    c: Call, x: Value, y: Value, weight: Value | None = None, pos_weight: Value | None = None,
    reduction: int = 1,
) -> Value:  # fmt: skip
    """`max(x, 0) - x y + log(1 + exp(-|x|))`."""
    if weight is not None or pos_weight is not None:
        raise CaptureError("binary cross entropy with weights")
    soft = c.b.Log(c.b.Add(c.b.Exp(c.b.Neg(c.b.Abs(x))), 1.0))
    return _reduce_loss(c, c.b.Add(c.b.Sub(c.b.Relu(x), c.b.Mul(x, y)), soft), reduction)


def _reduce_loss(c: Call, x: Value, reduction: int) -> Value:
    if reduction == 0:
        return x
    op_type = "ReduceMean" if reduction == 1 else "ReduceSum"
    dims = c.b.ints(range(type_of(x).rank))
    return c.b.one(op_type, [x, dims], {"keepdims": 0})


TABLE = table(
    {
        _cross_entropy: "cross_entropy_loss.default",
        _mse: "mse_loss.default",
        _bce: "binary_cross_entropy_with_logits.default",
    }
)
