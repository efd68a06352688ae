"""ATen -> ONNX for composites, which stay whole: normalisation, attention, dropout, losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.capture.aten import Call, aten
from onward.config import CaptureError
from onward.graph.build import is_zero
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Size, Type, divide, product

_IGNORED = -100  # PyTorch's own default for a label that counts for nothing


@aten("layer_norm.default")
def _layer_norm(
    c: Call, x: Value, shape: list[int], weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, *_: Any,
) -> Value:  # fmt: skip
    inner = Type(type_of(x).dtype, tuple(shape))
    scale = weight if weight is not None else c.b.const(np.ones(shape, inner.dtype.numpy()))
    shift = bias if bias is not None else c.b.const(np.zeros(shape, inner.dtype.numpy()))
    return c.b.LayerNormalization(x, scale, shift, axis=-len(shape), epsilon=eps)[0]


@aten("softmax.int", "_softmax.default", "log_softmax.int", "_log_softmax.default")
def _softmax(c: Call, x: Value, dim: int, *_: Any) -> Value:
    op_type = "LogSoftmax" if "log_softmax" in str(c.node.target) else "Softmax"
    x = c.value(x, c.type.dtype)
    rank = type_of(x).rank
    dim = dim % rank
    swap = [*(i for i in range(rank) if i != dim), dim]
    y = c.b.one(op_type, [c.b.transpose(x, swap)], {"axis": -1})
    back = [swap.index(i) for i in range(rank)]
    return c.b.transpose(y, back)


@aten("dropout.default", "dropout_.default", "feature_dropout.default")
def _dropout(c: Call, x: Value, ratio: float, train: bool) -> Value:
    if "feature" in str(c.node.target):
        raise CaptureError("feature dropout")
    if not train or ratio == 0.0:
        return x
    r = c.random(x)
    return c.b.Dropout(
        x, r["seed"], r["offset"], ratio=float(ratio), site=r["site"], sample_dim=r["sample_dim"]
    )


def _attention(
    c: Call, q: Value, k: Value, v: Value, mask: Value | None, ratio: float, causal: bool,
    scale: float | None,
) -> Value:  # fmt: skip
    size = type_of(q).shape[-1]
    assert isinstance(size, int)
    attrs: dict[str, Any] = {
        "scale": float(scale) if scale is not None else 1.0 / math.sqrt(size),
        "is_causal": int(causal),
    }
    if ratio == 0.0:
        return (
            c.b.Attention(q, k, v, mask, **attrs)
            if mask is not None
            else c.b.Attention(q, k, v, **attrs)
        )
    shape = (*type_of(q).shape[:-1], type_of(k).shape[-2])
    like = Value(name="probabilities")
    like.meta["type"] = type_of(q).with_shape(shape)
    r = c.random(like)
    attrs |= {"ratio": float(ratio), "site": r["site"], "sample_dim": r["sample_dim"]}
    return c.b.Attention(q, k, v, mask, r["seed"], r["offset"], **attrs)


@aten("onward.attention.default")
def _onward_attention(
    c: Call, q: Value, k: Value, v: Value, mask: Value | None, padding: Value | None,
    bias: Value | None, causal: bool, scale: float, ratio: float, _: bool,
) -> Value:  # fmt: skip
    if mask is None:
        mask = padding if bias is None or is_zero(bias) else _biased(c, bias, padding)
    return _attention(c, q, k, v, mask, ratio, causal, scale)


def _biased(c: Call, bias: Value, mask: Value | None) -> Value:
    """`bias + mask`: one sum, so that what is trained and what the batch says stay apart."""
    if mask is None:
        return bias
    if type_of(mask).dtype == DType.BOOL:
        dtype = type_of(bias).dtype
        least = c.b.const(np.array(np.finfo(dtype.numpy()).min, dtype=dtype.numpy()))
        mask = c.b.Where(mask, c.b.scalar(0.0, dtype), least)
    return c.b.Add(bias, mask)


def _each_for_its_group(c: Call, x: Value, heads: Size) -> Value:
    """x f[*,G,S,K] -> f[*,heads,S,K]: each head of keys or values serves `heads / G` queries."""
    shape = type_of(x).shape
    groups = divide(heads, shape[-3])
    assert groups is not None, f"{heads} heads over {shape[-3]} of keys"
    wide = (*shape[:-2], groups, *shape[-2:])
    whole = (*shape[:-3], heads, *shape[-2:])
    return c.b.reshape(c.b.expand(c.b.unsqueeze(x, [len(shape) - 2]), wide), whole)


@aten("scaled_dot_product_attention.default")
def _sdpa(
    c: Call, q: Value, k: Value, v: Value, mask: Value | None = None, ratio: float = 0.0,
    causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    if enable_gqa:
        k, v = (_each_for_its_group(c, x, type_of(q).shape[-3]) for x in (k, v))
    return _attention(c, q, k, v, mask, ratio, causal, scale)


@aten("cross_entropy_loss.default")
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


@aten("mse_loss.default")
def _mse(c: Call, x: Value, y: Value, reduction: int = 1) -> Value:
    d = c.b.Sub(x, y)
    return _reduce_loss(c, c.b.Mul(d, d), reduction)


@aten("binary_cross_entropy_with_logits.default")
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
