"""Losses over classes, in their full form: any dims, and class weights that train."""

from __future__ import annotations

import numpy as np

from onward.graph.graph import Value, array_of, type_of
from onward.graph.importer.decomposition import NodeCall, Results, decomposition
from onward.graph.ops.loss import NEVER
from onward.graph.types import DType


@decomposition("SoftmaxCrossEntropyLoss")
def _cross_entropy(c: NodeCall) -> Results:
    """Cross-entropy, as a node if its kernel takes it: logits as rows, constant class weights."""
    b, weighted = c.b, c.present(2)
    fixed = not weighted or array_of(c.x(2)) is not None
    if c.rank() == 2 and fixed and c.outputs == 1:
        ignored = int(c.given.get("ignore_index", NEVER))  # the standard has no default
        return c.plain_node(c.x(), b_labels(c), *c.inputs[2:], ignore_index=ignored)[0]
    order = [0, *range(2, c.rank()), 1]
    log_prob = b.LogSoftmax(b.transpose(c.x(), order), axis=-1)
    log_prob = b.transpose(log_prob, [order.index(d) for d in range(c.rank())])
    return [_nll(c, log_prob), log_prob][: c.outputs]


@decomposition("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(c: NodeCall) -> Results:
    return _nll(c, c.x())


def _nll(c: NodeCall, log_prob: Value) -> Value:
    b, labels = c.b, b_labels(c)
    ignored = c.given.get("ignore_index")
    dtype = type_of(log_prob).dtype
    counted = None
    if ignored is not None:
        counted = b.Not(b.Equal(labels, np.array(int(ignored), np.int64)))
        labels = b.Where(counted, labels, np.zeros((), np.int64))
    picked = b.squeeze(b.GatherElements(log_prob, b.unsqueeze(labels, [1]), axis=1), [1])
    share: Value | None = None
    if c.present(2):
        share = b.Gather(c.x(2), labels, axis=0)
    if counted is not None:
        zero = b.scalar(0, dtype)
        share = b.cast(counted, dtype) if share is None else b.Where(counted, share, zero)
    loss = b.Neg(picked if share is None else b.Mul(picked, share))
    reduction, dims = c.attr("reduction", "mean"), list(range(type_of(loss).rank))
    if reduction == "none":
        return loss
    if reduction == "mean" and share is None:
        return b.ReduceMean(loss, keepdims=0)
    total = b.reduce_sum(loss, dims, keepdims=False)
    if reduction == "sum" or share is None:
        return total
    return b.Div(total, b.reduce_sum(share, dims, keepdims=False))


def b_labels(c: NodeCall) -> Value:
    return c.b.cast(c.x(1), DType.INT64)
