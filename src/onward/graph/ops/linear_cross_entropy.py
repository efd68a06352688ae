"""A linear head and its cross-entropy as one op, so that the logits need never exist as a whole.

    logits = x w^T + bias      f[N,V]
    loss   = SoftmaxCrossEntropyLoss(logits, labels, class_weight)

Four ops: the loss alone, for evaluation; the gradients alone, where the loss's own gradient arrives
later; both at once, where it is known before (as in a whole training step) or taken to be 1; and
the product of gradients made for 1 with the loss's own gradient. Kernels work on blocks of rows, as
arXiv 2411.09009 and Liger Kernel (arXiv 2410.10989) do on GPUs. For x and w of low precision, the
loss, dw and dbias are f32, since they are sums over the rows. Label smoothing is PyTorch's: (1 - s)
nll + s / V * sum over classes of -log p.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, Types
from onward.graph.types import DType, Size, Type, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _counted(b: Builder, labels: Value, attrs: dict[str, Any]) -> tuple[Value, Value]:
    """A mask b[N] of rows that count, and the labels i64[N], 0 in other rows."""
    counted = b.Not(b.Equal(labels, np.array(attrs["ignore_index"], dtype=np.int64)))
    return counted, b.Where(counted, labels, np.zeros((), dtype=np.int64))


def _terms(
    b: Builder, logits: Value, labels: Value, weight: Value | None, attrs: dict[str, Any]
) -> tuple[Value, Value, Value, Value, Value]:
    """The terms of the loss: log p f[N,V], whether each class is the label's b[N,V], the target
    distribution times class weights f[N,V], the mask of rows that count b[N], and the divisor of
    the sum f[]."""
    dtype, classes = type_of(logits).dtype, type_of(logits).shape[1]
    log_prob = b.LogSoftmax(logits, axis=-1)
    counted, label = _counted(b, labels, attrs)
    at = b.Equal(b.unsqueeze(label, [1]), b.arange(classes))
    onehot = b.cast(at, dtype)
    smoothing = float(attrs.get("label_smoothing", 0.0))
    target = onehot
    if smoothing:
        share = b.Div(b.scalar(smoothing, dtype), b.cast(b.squeeze(b.size(classes), [0]), dtype))
        target = b.Add(b.Mul(onehot, 1.0 - smoothing), share)
    shares = b.cast(counted, dtype)
    if weight is not None:
        target = b.Mul(target, weight)
        shares = b.Mul(shares, b.Gather(weight, label, axis=0))
    if attrs["reduction"] == "mean":
        total = b.reduce_sum(shares, [0], keepdims=False)
    else:
        total = b.scalar(1.0, dtype)
    return log_prob, at, target, counted, total


def _logits(b: Builder, x: Value, w: Value, bias: Value | None) -> Value:
    return b.Gemm(x, w, transB=1) if bias is None else b.Gemm(x, w, bias, transB=1)


def _loss(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, w, bias, labels, weight = [*inputs, None, None][:5]
    assert x is not None and w is not None and labels is not None
    logits = _logits(b, x, w, bias)
    log_prob, at, target, counted, total = _terms(b, logits, labels, weight, attrs)
    if not attrs.get("label_smoothing"):  # a class without probability has no part in the loss
        log_prob = b.Where(at, log_prob, b.scalar(0.0, type_of(x).dtype))
    rows = b.Neg(b.reduce_sum(b.Mul(target, log_prob), [1], keepdims=False))
    rows = b.Where(counted, rows, b.scalar(0.0, type_of(x).dtype))
    return [b.Div(b.reduce_sum(rows, [0], keepdims=False), total)]


def _grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dloss, x, w, bias, labels, weight = [*inputs, None, None][:6]
    assert dloss is not None and x is not None and w is not None and labels is not None
    logits = _logits(b, x, w, bias)
    log_prob, at, target, counted, total = _terms(b, logits, labels, weight, attrs)
    mass = b.reduce_sum(target, [1], keepdims=True)
    dlogits = b.Sub(b.Mul(b.Exp(log_prob), mass), target)
    share = b.Where(counted, b.Div(dloss, total), b.scalar(0.0, type_of(x).dtype))
    # an infinite gradient becomes inf - inf at the label, or with smoothing at every class
    off, zero = b.unsqueeze(b.Sub(share, share), [1]), b.scalar(0.0, type_of(x).dtype)
    own = off if attrs.get("label_smoothing") else b.Where(at, off, zero)
    dlogits = b.Add(b.Mul(dlogits, b.unsqueeze(share, [1])), own)
    out = [b.Gemm(dlogits, w), b.Gemm(dlogits, x, transA=1)]
    if bias is not None:
        out.append(b.reduce_sum(dlogits, [0], keepdims=False))
    return out


def _step(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    return [*_loss(b, inputs[1:], attrs), *_grad(b, inputs, attrs)]


def _scale(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dloss, labels, *gradients = inputs
    assert dloss is not None and labels is not None
    dtype = type_of(dloss).dtype
    off = b.Sub(dloss, dloss)  # f[]: 0, or NaN for a gradient that is not finite
    spoilt, clean = b.Add(dloss, off), b.Where(b.IsNaN(off), b.scalar(0.0, dtype), dloss)
    counted, label = _counted(b, labels, attrs)
    some = b.cast(b.reduce_sum(b.cast(counted, DType.INT64), [0], keepdims=False), DType.BOOL)
    row = b.unsqueeze(b.Where(counted, spoilt, clean), [1])  # f[N,1]
    every = b.Where(some, spoilt, clean)
    out = []
    for i, g in enumerate(gradients):
        assert g is not None
        if type_of(g).rank == 2:
            out.append(b.Mul(g, row if attrs["rows"] and not i else every))
        elif attrs.get("label_smoothing"):
            out.append(b.Mul(g, every))
        else:
            at = b.Equal(b.unsqueeze(label, [1]), b.arange(type_of(g).shape[0]))
            zero = b.scalar(0.0, dtype)
            at = b.Where(at, b.unsqueeze(b.Where(counted, off, zero), [1]), zero)  # f[N,V]
            scaled = b.Mul(g, b.Where(some, dloss, clean))
            out.append(b.Add(scaled, b.reduce_sum(at, [0], keepdims=False)))
    return out


def _infer_loss(call: Call) -> list[Type]:
    return [Type(call.type(0).accumulated.dtype, ())]


def _infer_grad(call: Call) -> list[Type]:
    bias = [call.type(3).accumulated] if call.present(3) else []
    return [call.type(1), call.type(2).accumulated, *bias]


def _infer_step(call: Call) -> list[Type]:
    return [Type(call.type(1).accumulated.dtype, ()), *_infer_grad(call)]


def _infer_scale(call: Call) -> list[Type]:
    return [call.type(i) for i in range(2, len(call.inputs))]


_MEAN = {"ignore_index": -100, "reduction": "mean"}
_SMOOTH = {"ignore_index": 1, "reduction": "mean", "label_smoothing": 0.1}
_ARGS = ("f32[6,4]", "f32[9,4]", None, "i64[6]")
_ALL = ("f32[6,4]", "f32[9,4]", "f32[9]", "i64[6]", "f32[9]")

_FORWARD = (
    (_MEAN, _ARGS),
    ({**_MEAN, "reduction": "sum"}, ("f32[5,3]", "f32[4,3]", "f32[4]", "i64[5]")),
    (_SMOOTH, _ARGS),
    (_SMOOTH, _ALL),
)
_SCALE = (
    ({"ignore_index": -100, "rows": 1}, ("f32[]", "i64[6]", "f32[6,4]", "f32[9,4]", "f32[9]")),
    (
        {"ignore_index": 1, "rows": 1, "label_smoothing": 0.1},
        ("f32[]", "i64[6]", "f32[6,4]", "f32[9,4]", "f32[9]"),
    ),
    ({"ignore_index": -100, "rows": 0}, ("f32[]", "i64[6]", "f32[9,4]")),
)
_BACKWARD = tuple((attrs, ("f32[]", *types)) for attrs, types in _FORWARD)


def _one_product(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    x, w = inputs[:2]
    assert x is not None and w is not None
    return product(x.shape) * w.shape[0] * 2


def _three_products(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of the gradient: the logits again, dx and dw."""
    return _one_product(inputs[1:], outputs, attrs) * 3


OPS = (
    Op(
        name="LinearCrossEntropy",
        flops=_one_product,
        infer=_infer_loss,
        body=_loss,
        doc="loss f[] from x f[N,D], w f[V,D], bias f[V], labels i64[N], class_weight f[V].",
        cases=_FORWARD,
    ),
    Op(
        name="LinearCrossEntropyGrad",
        flops=_three_products,
        infer=_infer_grad,
        body=_grad,
        doc="dx, dw and, where there is a bias, dbias, from dloss f[] and the inputs of "
        "LinearCrossEntropy.",
        cases=_BACKWARD,
    ),
    Op(
        name="LinearCrossEntropyStep",
        flops=_three_products,
        infer=_infer_step,
        body=_step,
        doc="loss, dx, dw(, dbias): both of the above in one go.",
        cases=_BACKWARD,
    ),
    Op(
        name="LinearCrossEntropyScale",
        infer=_infer_scale,
        body=_scale,
        doc="dx, dw and dbias (those that are given; dx where `rows` is 1) of a loss that weighs "
        "1, times the loss's gradient dloss f[]; from it and labels i64[N]. What is not finite "
        "reaches no row that does not count, and where no row does nothing; where dloss is "
        "infinite, a label's own logit gets NaN.",
        cases=_SCALE,
    ),
)
