"""Cross-entropy with label smoothing, and the gradient of cross-entropy with and without it.

Sources: https://onnx.ai/onnx/operators/onnx__SoftmaxCrossEntropyLoss.html,
`torch.nn.functional.cross_entropy`; label smoothing from arXiv 1512.00567, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, standard
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value
IGNORED = -100  # the label that a node ignores which states none
NEVER = -(1 << 31)  # as `ignore_index`: no label is ignored


def ignored_label(attrs: Mapping[str, Any]) -> int:
    """The label that a cross-entropy with these attributes ignores."""
    return int(attrs.get("ignore_index", IGNORED))


def _smoothed(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The smoothed loss, `(1 - e) nll + e smooth`; for each row
    `smooth = -mean_c(weight_c log_prob_c)`."""
    logits, labels = inputs[:2]
    weight = inputs[2] if len(inputs) > 2 else None
    assert logits is not None and labels is not None
    dtype, classes, rank = type_of(logits).dtype, type_of(logits).shape[1], type_of(logits).rank
    smoothing, ignored = float(attrs["label_smoothing"]), ignored_label(attrs)
    reduction = attrs.get("reduction", "mean")
    nll, log_prob = b.SoftmaxCrossEntropyLoss(
        *inputs, reduction=reduction, ignore_index=ignored
    )  # f[] or f[N,*S], f[N,C,*S]
    every = log_prob
    if weight is not None:
        every = b.Mul(log_prob, b.reshape(weight, (classes, *[1] * (rank - 2))))
    smooth = b.Neg(b.ReduceMean(every, b.ints([1]), keepdims=0))  # f[N,*S]
    counted = b.Not(b.Equal(labels, np.array(ignored, dtype=np.int64)))
    smooth = b.Where(counted, smooth, b.scalar(0.0, dtype))
    dims = list(range(rank - 1))
    if reduction != "none":
        smooth = b.reduce_sum(smooth, dims, keepdims=False)
    if reduction == "mean":
        share = b.cast(counted, dtype)
        if weight is not None:
            label = b.Where(counted, labels, np.zeros((), dtype=np.int64))
            share = b.Mul(share, b.Gather(weight, label, axis=0))
        smooth = b.Div(smooth, b.reduce_sum(share, dims, keepdims=False))
    return [b.Add(b.Mul(nll, 1.0 - smoothing), b.Mul(smooth, smoothing)), log_prob]


def _grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dloss, log_prob, labels = inputs[:3]
    weight = inputs[3] if len(inputs) > 3 else None
    assert dloss is not None and log_prob is not None and labels is not None
    dtype = type_of(log_prob).dtype
    classes, rank = type_of(log_prob).shape[1], type_of(log_prob).rank
    counted = b.Not(b.Equal(labels, np.array(ignored_label(attrs), dtype=np.int64)))
    label = b.Where(counted, labels, np.zeros((), dtype=np.int64))  # i64[N,*S]
    smoothing = float(attrs.get("label_smoothing", 0.0))
    share = b.cast(counted, dtype)  # f[N,*S]
    if weight is not None:
        share = b.Mul(share, b.Gather(weight, label, axis=0))
    even = dloss  # the weight of a row's smooth loss: as `share`, without the label's class weight
    if attrs.get("reduction", "mean") == "mean":
        total = b.reduce_sum(share, list(range(rank - 1)), keepdims=False)
        even = b.Div(dloss, total)
        # without labels that count the loss is 0/0, but the gradient is 0, as in PyTorch
        share = b.Where(counted, b.Div(b.Mul(share, dloss), total), b.scalar(0.0, dtype))
    else:
        share = b.Where(counted, b.Mul(share, dloss), b.scalar(0.0, dtype))  # not 0 * inf
    index = b.reshape(b.arange(classes), (classes, *[1] * (rank - 2)))  # i64[C,1,...]
    onehot = b.cast(b.Equal(b.unsqueeze(label, [1]), index), dtype)  # f[N,C,*S]
    p = b.Exp(log_prob)  # f[N,C,*S]
    if smoothing == 0.0:
        return [b.Mul(b.Sub(p, onehot), b.unsqueeze(share, [1]))]
    even = b.Where(counted, even, b.scalar(0.0, dtype))  # f[N,*S]
    ones = b.full(1.0, Type(dtype, (classes,)))
    each = b.reshape(ones if weight is None else weight, (classes, *[1] * (rank - 2)))
    mean = b.ReduceMean(each, keepdims=0)  # f[], of all class weights
    each = b.Div(each, b.cast(b.squeeze(b.size(classes), [0]), dtype))  # f[C,1,...]
    sharp = b.Mul(b.Sub(p, onehot), b.unsqueeze(b.Mul(share, 1.0 - smoothing), [1]))
    smooth = b.Mul(b.Sub(b.Mul(p, mean), each), b.unsqueeze(b.Mul(even, smoothing), [1]))
    return [b.Add(sharp, smooth)]


def _infer_loss(call: Call) -> list[Type]:
    x = call.type()
    shape = call.shape(1) if call.attrs.get("reduction", "mean") == "none" else ()
    return [Type(x.dtype, shape), x]


def _infer(call: Call) -> list[Type]:
    return [call.type(1)]


_ARGS = ("f32[]", "f32[6,9]", "i64[6]")
_SMOOTH = {"ignore_index": -100, "label_smoothing": 0.125}


def _cross_entropy(call: Call) -> list[Type]:
    x = call.type()
    shape = call.shape(1) if call.attrs.get("reduction", "mean") == "none" else ()
    return [Type(x.dtype, shape), x]


OPS = (
    *standard(_cross_entropy, "SoftmaxCrossEntropyLoss"),
    Op(
        name="CrossEntropyLoss",
        infer=_infer_loss,
        body=_smoothed,
        doc="Cross-entropy with label smoothing: loss and log-probabilities f[N,C] from logits "
        "f[N,C], labels i64[N] and class weights f[C]. Plain cross-entropy stays "
        "SoftmaxCrossEntropyLoss.",
        cases=(
            ({**_SMOOTH, "reduction": "mean"}, ("f32[6,9]", "i64[6]")),
            ({**_SMOOTH, "reduction": "mean"}, ("f32[6,9]", "i64[6]", "f32[9]")),
            ({**_SMOOTH, "reduction": "mean", "ignore_index": 1}, ("f32[7,5]", "i64[7]", "f32[5]")),
            ({**_SMOOTH, "reduction": "sum", "ignore_index": 0}, ("f32[6,9]", "i64[6]")),
            ({**_SMOOTH, "reduction": "sum"}, ("f32[6,9]", "i64[6]", "f32[9]")),
            ({**_SMOOTH, "reduction": "none"}, ("f32[6,9]", "i64[6]")),
            ({**_SMOOTH, "reduction": "none", "ignore_index": 2}, ("f32[3,5]", "i64[3]", "f32[5]")),
            ({**_SMOOTH, "label_smoothing": 1.0}, ("f32[2,6]", "i64[2]", "f32[6]")),
            (_SMOOTH, ("f32[2,5]", "i64[2]")),
        ),
    ),
    Op(
        name="SoftmaxCrossEntropyLossGrad",
        infer=_infer,
        body=_grad,
        doc="dlogits f[N,C] from dloss, the saved log-probabilities f[N,C], labels i64[N] and "
        "class weights; of CrossEntropyLoss where label_smoothing is not 0.",
        cases=(
            ({"reduction": "mean", "ignore_index": -100}, _ARGS),
            ({"reduction": "mean", "ignore_index": 1}, (*_ARGS, "f32[9]")),
            ({"reduction": "sum", "ignore_index": -100}, _ARGS),
            ({"reduction": "none", "ignore_index": 2}, ("f32[6]", "f32[6,9]", "i64[6]")),
            ({**_SMOOTH, "reduction": "mean"}, _ARGS),
            ({**_SMOOTH, "reduction": "mean", "ignore_index": 1}, (*_ARGS, "f32[9]")),
            ({**_SMOOTH, "reduction": "sum"}, (*_ARGS, "f32[9]")),
            ({**_SMOOTH, "reduction": "none", "ignore_index": 2}, ("f32[6]", "f32[6,9]", "i64[6]")),
            ({**_SMOOTH, "reduction": "none"}, ("f32[6]", "f32[6,9]", "i64[6]", "f32[9]")),
        ),
    ),
)
