"""Rules of cross-entropies whose classes are split: a vocabulary's logits are never gathered.

    highest = max over ranks of max_j x_j                 [N], one all-reduce
    total   = sum over ranks of sum_j exp(x_j - highest)  [N], one all-reduce with the next
    own     = the label's x, 0 where it is another rank's [N]
    loss    = log(total) + highest - own

x are the rank's own logits f[N,V/ranks]. Source: Megatron-LM (arXiv 1909.08053), section 3. Label
smoothing adds the sum of all logits to the second exchange. Class weights are left to the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.distribute.tensor.numbers_in_range import within
from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.ops.loss import ignored_label
from onward.graph.types import DType, Size, Type


def _rows(call: ShardedCall, labels: int) -> tuple[Type, ...]:
    """The types of what is exchanged: numbers for each label."""
    row = Type(DType.FLOAT, call.shape(labels))
    return (row, row, row)


@dataclass(frozen=True)
class SplitLogSoftmax:
    """A log-softmax over classes of which each rank has some.

    log_prob: f[N,V/ranks,*S], of the rank's classes. at: whether each is the label's,
    b[N,V/ranks,*S]. counted: which rows have a label, b[N,*S]. own: the label's log-probability,
    f[N,*S]. mean: of those of all classes, f[N,*S]; None without label smoothing.
    """

    log_prob: Value
    at: Value
    counted: Value
    own: Value
    mean: Value | None


def _log_softmax(
    b: Builder, logits: Value, labels: Value, attrs: dict[str, Any], place: RankPlace, what: str
) -> SplitLogSoftmax:
    """Computes the parts of a log-softmax from the rank's logits f[N,V/ranks,*S] and all labels
    i64[N,*S]."""
    dtype, classes = type_of(logits).dtype, type_of(logits).shape[1]
    assert isinstance(classes, int)
    one = b.ints([1])
    highest = b.ReduceMax(logits, one, keepdims=1)
    [highest] = place.reduced(b, [highest], f"the highest logits of {what}", "max")
    shifted = b.Sub(logits, highest)
    at, counted = _labelled(b, logits, labels, attrs, place)
    zero = b.scalar(0.0, dtype)
    terms = [
        b.reduce_sum(b.Exp(shifted), [1], keepdims=True),
        b.reduce_sum(b.Where(at, shifted, zero), [1], keepdims=False),
    ]
    smooth = float(attrs.get("label_smoothing", 0.0))
    if smooth:
        terms.append(b.reduce_sum(shifted, [1], keepdims=False))
    found = place.reduced(b, terms, f"the sums of exponentials of {what}", "sum")
    log_total = b.Log(found[0])
    flat = b.squeeze(log_total, [1])
    mean = None
    if smooth:
        mean = b.Sub(b.Div(found[2], float(classes * place.ranks)), flat)
    return SplitLogSoftmax(b.Sub(shifted, log_total), at, counted, b.Sub(found[1], flat), mean)


def _labelled(
    b: Builder, logits: Value, labels: Value, attrs: dict[str, Any], place: RankPlace
) -> tuple[Value, Value]:
    """Whether each of the rank's classes is the label's b[N,V/ranks,*S], and which rows count
    b[N,*S]."""
    classes, rank = type_of(logits).shape[1], type_of(logits).rank
    assert isinstance(classes, int)
    ignored = np.array(ignored_label(attrs), dtype=type_of(labels).dtype.numpy())
    limit = classes * place.ranks
    labels = within(b, labels, limit, "label", place.shared, ignored=int(ignored))
    counted = b.Not(b.Equal(labels, ignored))
    label = b.Where(counted, labels, np.zeros((), ignored.dtype))
    first = np.array(classes * place.at, ignored.dtype)
    index = b.reshape(b.Add(b.arange(classes), first), (classes, *[1] * (rank - 2)))
    return b.And(b.Equal(b.unsqueeze(label, [1]), index), b.unsqueeze(counted, [1])), counted


def _loss(b: Builder, found: SplitLogSoftmax, attrs: dict[str, Any], rank: int) -> Value:
    """The loss f[], or f[N,*S] without a reduction."""
    dtype = type_of(found.own).dtype
    smooth = float(attrs.get("label_smoothing", 0.0))
    rows = b.Neg(found.own)
    if found.mean is not None:
        rows = b.Sub(b.Mul(rows, 1.0 - smooth), b.Mul(found.mean, smooth))
    rows = b.Where(found.counted, rows, b.scalar(0.0, dtype))
    dims = list(range(rank - 1))
    reduction = attrs.get("reduction", "mean")
    if reduction == "none":
        return rows
    total: Value = b.reduce_sum(rows, dims, keepdims=False)
    if reduction == "mean":
        total = b.Div(total, b.reduce_sum(b.cast(found.counted, dtype), dims, keepdims=False))
    return total


def _dlogits(
    b: Builder, log_prob: Value, at: Value, counted: Value, dloss: Value, attrs: dict[str, Any],
    classes: int,
) -> tuple[Value, Value]:  # fmt: skip
    """The gradient of the rank's logits f[N,V/ranks,*S], and the weight of each row in it
    f[N,1,*S]. classes: of all ranks."""
    dtype, rank = type_of(log_prob).dtype, type_of(log_prob).rank
    zero = b.scalar(0.0, dtype)
    smooth = float(attrs.get("label_smoothing", 0.0))
    target: Value = b.cast(at, dtype)
    if smooth:
        target = b.Add(b.Mul(target, 1.0 - smooth), smooth / classes)
    if attrs.get("reduction", "mean") == "mean":
        count = b.reduce_sum(b.cast(counted, dtype), list(range(rank - 1)), keepdims=False)
        dloss = b.Div(dloss, count)
    share = b.unsqueeze(b.Where(counted, dloss, zero), [1])  # f[N,1,*S]
    return b.Mul(b.Sub(b.Exp(log_prob), target), share), share


# ---- a head and its loss as one op


@way_rule("LinearCrossEntropy")
def _head(call: ShardedCall) -> Iterator[Way]:
    """Rows of the head's weight: the classes."""
    if call.present(4):
        return
    found = {1: split(0), **({2: split(0)} if call.present(2) else {})}
    yield Way(call.inputs(found), (REPLICATED,), _head_loss, _rows(call, 3))


@way_rule("LinearCrossEntropyGrad")
def _head_gradient(call: ShardedCall) -> Iterator[Way]:
    if call.present(5):
        return
    found = {2: split(0), **({3: split(0)} if call.present(3) else {})}
    sides = [split(0) for _ in call.results[1:]]
    yield Way(call.inputs(found), (PARTIAL, *sides), _head_gradients, _rows(call, 4))


def _exact(b: Builder, x: Value | None) -> Value | None:
    """x in f32 where it has less precision, in which losses are not computed."""
    return b.cast(x, type_of(x).accumulated.dtype) if x is not None else None


def _of_head(
    b: Builder, node: Node, xs: Sequence[Value | None], place: RankPlace
) -> tuple[SplitLogSoftmax, Sequence[Value | None]]:
    """The log-softmax of a head's logits, which the loss and its gradient share. xs: x, w, bias and
    labels."""
    x, w, bias = (_exact(b, each) for each in xs[:3])
    labels = xs[3]
    assert x is not None and w is not None and labels is not None
    attrs = attributes(node)
    key = ("head", *xs, attrs.get("ignore_index"), float(attrs.get("label_smoothing", 0.0)))
    if key not in place.shared:
        logits = b.Gemm(x, w, transB=1) if bias is None else b.Gemm(x, w, bias, transB=1)
        place.shared[key] = _log_softmax(b, logits, labels, attrs, place, node.name or "a head")
    return place.shared[key], (x, w, bias)


def _head_loss(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    found, _ = _of_head(b, node, [*inputs, None][:4], place)
    loss = _loss(b, found, attributes(node), 2)
    return [b.cast(loss, type_of(node.outputs[0]).dtype)]


def _head_gradients(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    found, (x, w, _) = _of_head(b, node, inputs[1:5], place)
    dloss, table = inputs[0], inputs[2]
    assert dloss is not None and table is not None
    dloss = b.cast(dloss, type_of(found.log_prob).dtype)
    rows = type_of(table).shape[0]
    assert isinstance(rows, int)
    attrs = attributes(node)
    dlogits, share = _dlogits(
        b, found.log_prob, found.at, found.counted, dloss, attrs, rows * place.ranks
    )
    off = b.Sub(share, share)  # an infinite gradient is NaN at the label, as in the whole op
    if not attrs.get("label_smoothing"):
        off = b.Where(found.at, off, b.scalar(0.0, type_of(off).dtype))
    dlogits = b.Add(dlogits, off)
    out = [b.Gemm(dlogits, w), b.Gemm(dlogits, x, transA=1)]
    if len(node.outputs) > 2:
        out.append(b.reduce_sum(dlogits, [0], keepdims=False))
    return [b.cast(y, type_of(o).dtype) for y, o in zip(out, node.outputs, strict=True)]


# ---- a loss of logits


@way_rule("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
def _of_logits(call: ShardedCall) -> Iterator[Way]:
    if call.present(2):
        return
    made = (REPLICATED, split(1))[: len(call.results)]
    yield Way(call.inputs({0: split(1)}), made, _loss_of_logits, _rows(call, 1))


@way_rule("SoftmaxCrossEntropyLossGrad")
def _gradient_of_logits(call: ShardedCall) -> Iterator[Way]:
    if not call.present(3):
        yield Way(call.inputs({1: split(1)}), (split(1),), _gradient_from_log_prob)


def _loss_of_logits(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    logits, labels = inputs[:2]
    wide = _exact(b, logits)
    assert wide is not None and labels is not None
    found = _log_softmax(b, wide, labels, attributes(node), place, node.name or "a loss")
    loss = _loss(b, found, attributes(node), type_of(wide).rank)
    made = [loss, found.log_prob][: len(node.outputs)]
    return [b.cast(y, type_of(o).dtype) for y, o in zip(made, node.outputs, strict=True)]


def _gradient_from_log_prob(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    dloss, log_prob, labels = (_exact(b, x) if i < 2 else x for i, x in enumerate(inputs[:3]))
    assert dloss is not None and log_prob is not None and labels is not None
    attrs = attributes(node)
    at, counted = _labelled(b, log_prob, labels, attrs, place)
    classes: Size = type_of(node.outputs[0]).shape[1]
    assert isinstance(classes, int)
    made, _ = _dlogits(b, log_prob, at, counted, dloss, attrs, classes)
    return [b.cast(made, type_of(node.outputs[0]).dtype)]
