"""Cross-entropy that a model writes out  =>  `SoftmaxCrossEntropyLoss`, and its sum.

    log_softmax(z)[label]                 =>  -SoftmaxCrossEntropyLoss(z, label, reduction="none")
    sum(onehot(label) * log_softmax(z))   =>  likewise, where a label of no class counts nothing
    sum of the losses of all rows         =>  SoftmaxCrossEntropyLoss(z, label, reduction="sum")

Masks of bools by which losses are multiplied before they are summed become labels that are ignored.
"""

from __future__ import annotations

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, array_of, attributes, type_of
from onward.graph.ops import named
from onward.graph.ops.loss import IGNORED, NEVER, ignored_label
from onward.graph.types import DType, product
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.matching import made_by, number_of, over_the_last

_VIEWS = named("reshapes") | {"Identity"}


def cross_entropy(graph: Graph) -> int:
    """Fuses every cross-entropy, then every sum of them; returns how many."""
    edits = 0
    for node in list(graph):
        made = _picked(graph, node) if node.op_type == "GatherElements" else _counted(graph, node)
        if made is not None:
            graph.replace(node.outputs[0], made)
            edits += 1
    for node in list(graph):
        if node.op_type in ("ReduceSum", "ReduceMean"):
            made = _summed(graph, node)
            if made is not None:
                graph.replace(node.outputs[0], made)
                edits += 1
    if edits:
        dead_code_elimination(graph)  # losses of rows would count as losses
    return edits


# ---- a row's loss


def _picked(graph: Graph, node: Node) -> Value | None:
    """The probability's logarithm that a GatherElements picks by labels; None for others."""
    z, index = _logits(graph, node.inputs[0]), node.inputs[1]
    rank = type_of(node.outputs[0]).rank
    if z is None or index is None or attributes(node).get("axis", 0) % rank != rank - 1:
        return None
    if type_of(index).shape != (*type_of(z).shape[:-1], 1):
        return None
    b = Builder.at(graph, node)
    return b.reshape(_row_losses(b, z, index, NEVER), type_of(node.outputs[0]).shape)


def _counted(graph: Graph, node: Node) -> Value | None:
    """The sum over classes of a one-hot row times log-probabilities; None for others."""
    rank = type_of(node.inputs[0]).rank if node.op_type == "ReduceSum" else 0
    times = made_by(node.inputs[0], "Mul") if rank else None
    if times is None or not over_the_last(node):
        return None
    for hot, other in (times.inputs, times.inputs[::-1]):
        z, label = _logits(graph, other), _label(hot)
        if z is None or label is None or hot is None or type_of(hot).shape != type_of(z).shape:
            continue
        if type_of(label).shape != (*type_of(z).shape[:-1], 1):
            continue
        b = Builder.at(graph, node)
        label = b.cast(label, DType.INT64)
        count = type_of(z).shape[-1]
        assert isinstance(count, int)
        if _is_class(label, count):
            losses = _row_losses(b, z, label, NEVER)
        else:
            zero, classes = (b.scalar(n, DType.INT64) for n in (0, count))
            known = b.And(b.GreaterOrEqual(label, zero), b.Less(label, classes))
            label = b.Where(known, label, b.scalar(IGNORED, DType.INT64))
            losses = _row_losses(b, z, label, IGNORED)
        return b.reshape(losses, type_of(node.outputs[0]).shape)
    return None


def _logits(graph: Graph, value: Value | None) -> Value | None:
    """What a value is the log-softmax of over its last dim, for one reader; None for others, since
    the loss keeps log-probabilities of its own."""
    node = made_by(value, "LogSoftmax")
    if node is None or node.inputs[0] is None:
        return None
    if len(node.outputs[0].uses()) != 1 or value in graph.output_values():
        return None
    rank = type_of(node.inputs[0]).rank
    sized = isinstance(type_of(node.inputs[0]).shape[-1], int)
    last = attributes(node).get("axis", -1) % rank == rank - 1
    return node.inputs[0] if rank > 1 and sized and last else None


def _label(hot: Value | None) -> Value | None:
    """The labels [...,1] whose one-hot rows a value is; None for others."""
    node = hot.producer() if hot is not None else None
    if node is None or hot is None:
        return None
    if node.op_type == "Where":
        if [number_of(x) for x in node.inputs[1:]] != [1.0, 0.0]:
            return None
    elif node.op_type != "Cast":
        return None
    equal = made_by(node.inputs[0], "Equal")
    count = type_of(hot).shape[-1]
    for label, classes in (equal.inputs, equal.inputs[::-1]) if equal is not None else ():
        numbers = array_of(classes)
        if label is None or numbers is None or numbers.size != count:
            continue
        right = numbers.shape[-1:] == (count,) and np.array_equal(
            numbers.reshape(-1), np.arange(numbers.size)
        )
        if right and type_of(label).dtype.is_integer():
            return label
    return None


def _is_class(label: Value, classes: int) -> bool:
    """Whether every label is one of the classes, or an error in the run."""
    value: Value | None = label
    while value is not None and (node := value.producer()) is not None and node.op_type in _VIEWS:
        value = node.inputs[0]
    checked = made_by(value, "InRange")
    if checked is None or {"wraps", "ignored"} & attributes(checked).keys():
        return False
    return number_of(checked.inputs[1]) == classes


def _row_losses(b: Builder, z: Value, label: Value, ignored: int) -> Value:
    """The negative losses of all rows, f[N]."""
    *leading, classes = type_of(z).shape
    rows = product(leading)
    found = b.SoftmaxCrossEntropyLoss(
        b.reshape(z, (rows, classes)), b.reshape(b.cast(label, DType.INT64), (rows,)),
        reduction="none", ignore_index=ignored,
    )  # fmt: skip
    return b.Neg(found[0])


# ---- the sum of all rows


def _summed(graph: Graph, node: Node) -> Value | None:
    """The sum or mean of the losses of all rows; None for others."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or product(type_of(y).shape) != 1 or attributes(node).get("keepdims", 1):
        return None
    sign, masks, value = 1, list[Value](), x
    while (maker := value.producer()) is not None and len(value.uses()) == 1:
        if maker.op_type == "SoftmaxCrossEntropyLoss":
            return _total(graph, node, maker, sign, masks)
        inner = maker.inputs[0]
        if maker.op_type == "Neg":
            sign = -sign
        elif maker.op_type == "Mul":
            inner = _unmasked(maker, masks)
        elif maker.op_type not in _VIEWS:
            return None
        if inner is None:
            return None
        value = inner
    return None


def _unmasked(node: Node, masks: list[Value]) -> Value | None:
    """The losses that a product with a mask of bools leaves out some of; notes the mask."""
    for mask, other in (node.inputs, node.inputs[::-1]):
        cast = made_by(mask, "Cast")
        held = cast.inputs[0] if cast is not None else None
        if held is None or other is None or type_of(held).dtype != DType.BOOL:
            continue
        if type_of(held).shape == type_of(other).shape:
            masks.append(held)
            return other
    return None


def _total(graph: Graph, node: Node, loss: Node, sign: int, masks: list[Value]) -> Value | None:
    attrs = attributes(loss)
    read = any(v.uses() or v in graph.output_values() for v in loss.outputs[1:])
    if attrs.get("reduction", "mean") != "none" or read or loss.outputs[0] in graph.output_values():
        return None
    b = Builder.at(graph, node)
    z, labels, *weight = loss.inputs
    assert labels is not None
    ignored, shape = ignored_label(attrs), type_of(labels).shape
    counts_all = ignored == NEVER and not masks and not any(w is not None for w in weight)
    for mask in masks:
        seen = b.reshape(mask, shape)
        labels = b.Where(seen, labels, b.scalar(ignored, type_of(labels).dtype))
    mean = node.op_type == "ReduceMean"
    total = b.SoftmaxCrossEntropyLoss(
        z, labels, *weight, reduction="mean" if mean and counts_all else "sum",
        ignore_index=ignored,
    )[0]  # fmt: skip
    if mean and not counts_all:
        count = b.cast(b.squeeze(b.size(product(shape)), [0]), type_of(total).dtype)
        total = b.Div(total, count)
    return b.reshape(total if sign == 1 else b.Neg(total), type_of(node.outputs[0]).shape)


__all__ = ["cross_entropy"]
