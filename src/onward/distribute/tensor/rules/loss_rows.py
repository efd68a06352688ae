"""Rules of cross-entropies along rows, each of which has a label: a sum over a rank's rows is a
term of the sum. A mean divides it by the labels of all ranks, which one all-reduce counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onward.distribute.tensor.sharding import PARTIAL, Sharding, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.ops.loss import ignored_label
from onward.graph.types import DType, Type

# by op: the places among the inputs of rows, of labels and of class weights
_LOSSES = {
    "LinearCrossEntropy": ((0, 3), 3, 4),
    "SoftmaxCrossEntropyLoss": ((0, 1), 1, 2),
    "CrossEntropyLoss": ((0, 1), 1, 2),
}
_GRADIENTS = {
    "LinearCrossEntropyGrad": ((1, 4), 4, 5),
    "SoftmaxCrossEntropyLossGrad": ((1, 2), 2, 3),
}
_INPUTS = {**_LOSSES, **_GRADIENTS}


@way_rule(*_INPUTS)
def _rows(call: ShardedCall) -> Iterator[Way]:
    (x_at, labels_at), _, weights_at = _INPUTS[call.node.op_type]
    x, reduction = call.type(x_at), call.attrs.get("reduction", "mean")
    if reduction == "mean" and call.present(weights_at):
        return
    for found in call.splits(x):
        if found.dim == 1:  # the classes, or the features of a head's rows
            continue
        labels = _of_labels(found)
        operands = {x_at: found, labels_at: labels}
        if reduction == "none" and call.node.op_type in _GRADIENTS:
            operands[0] = labels
        program = _of_all_labels if reduction == "mean" else None
        exchanged = (Type(DType.DOUBLE, ()),) if program else ()
        yield Way(call.inputs(operands), _results(call, found, reduction), program, exchanged)


def _of_labels(found: Sharding) -> Sharding:
    """The sharding of labels [N,*S] of rows [N,C,*S]."""
    assert found.dim is not None
    return split(found.dim - 1 if found.dim > 1 else 0, found.groups)


def _results(call: ShardedCall, found: Sharding, reduction: str) -> tuple[Sharding, ...]:
    if call.node.op_type in _GRADIENTS:
        return (found, *(PARTIAL for _ in call.results[1:]))
    loss = _of_labels(found) if reduction == "none" else PARTIAL
    return (loss, found)[: len(call.results)]


def _of_all_labels(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    """The mean as a sum over the labels of all ranks."""
    _, labels_at, _ = _INPUTS[node.op_type]
    labels = inputs[labels_at]
    assert labels is not None
    count = _count(b, labels, attributes(node), place, node)
    if node.op_type in _GRADIENTS:
        dloss, *rest = inputs
        assert dloss is not None
        some = b.Max(count, b.scalar(1.0, DType.DOUBLE))  # without labels the gradient is 0
        share = b.cast(b.Div(b.cast(dloss, DType.DOUBLE), some), type_of(dloss).dtype)
        return same_op(b, node, [share, *rest], reduction="sum")
    loss, *more = same_op(b, node, inputs, reduction="sum")
    return [b.Div(loss, b.cast(count, type_of(loss).dtype)), *more]


def _count(
    b: Builder, labels: Value, attrs: dict[str, object], place: RankPlace, node: Node
) -> Value:
    """The number of labels of all ranks that count, f64[]."""
    ignored = ignored_label(attrs)
    key = ("labels", labels, ignored)
    if key not in place.shared:
        dtype = type_of(labels).dtype.numpy()
        counted = b.Not(b.Equal(labels, np.array(ignored, dtype=dtype)))
        dims = list(range(type_of(labels).rank))
        own = b.reduce_sum(b.cast(counted, DType.DOUBLE), dims, keepdims=False)
        [place.shared[key]] = place.reduced(
            b, [own], f"the labels of {node.name or 'a loss'}", "sum"
        )
    return place.shared[key]
