"""The gradient of SoftmaxCrossEntropyLoss
(https://onnx.ai/onnx/operators/onnx__SoftmaxCrossEntropyLoss.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.infer import Call
from onward.graph.ops.record import Op
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dloss, log_prob, labels = inputs[:3]
    weight = inputs[3] if len(inputs) > 3 else None
    assert dloss is not None and log_prob is not None and labels is not None
    dtype = type_of(log_prob).dtype
    classes, rank = type_of(log_prob).shape[1], type_of(log_prob).rank
    counted = b.Not(b.Equal(labels, np.array(attrs.get("ignore_index", -100), dtype=np.int64)))
    label = b.Where(counted, labels, np.zeros((), dtype=np.int64))  # i64[N,*S]
    share = b.cast(counted, dtype)  # f[N,*S]
    if weight is not None:
        share = b.Mul(share, b.Gather(weight, label, axis=0))
    if attrs.get("reduction", "mean") == "mean":
        total = b.reduce_sum(share, list(range(rank - 1)), keepdims=False)
        # where no label counts the loss is 0/0, but the gradient is 0, as in PyTorch
        share = b.Where(counted, b.Div(b.Mul(share, dloss), total), b.scalar(0.0, dtype))
    else:
        share = b.Mul(share, dloss)
    index = b.reshape(b.arange(classes), (classes, *[1] * (rank - 2)))  # i64[C,1,...]
    onehot = b.cast(b.Equal(b.unsqueeze(label, [1]), index), dtype)  # f[N,C,*S]
    dx = b.Mul(b.Sub(b.Exp(log_prob), onehot), b.unsqueeze(share, [1]))  # f[N,C,*S]
    return [dx]


def _infer(call: Call) -> list[Type]:
    return [call.type(1)]


_ARGS = ("f32[]", "f32[6,9]", "i64[6]")

OPS = (
    Op(
        name="SoftmaxCrossEntropyLossGrad",
        infer=_infer,
        body=_grad,
        doc="dlogits f[N,C] from dloss, the saved log-probabilities f[N,C], labels i64[N] and "
        "class weights.",
        cases=(
            ({"reduction": "mean", "ignore_index": -100}, _ARGS),
            ({"reduction": "mean", "ignore_index": 1}, (*_ARGS, "f32[9]")),
            ({"reduction": "sum", "ignore_index": -100}, _ARGS),
            ({"reduction": "none", "ignore_index": 2}, ("f32[6]", "f32[6,9]", "i64[6]")),
        ),
    ),
)
