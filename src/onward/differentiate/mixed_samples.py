"""Losses in which samples of a batch depend on each other, as in contrastive losses and batch norm.

Ranks with a share of the batch each compute another loss than one process with all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from onward.differentiate.loss_sum import ancestors, averaged, samples_of
from onward.graph.graph import (
    Graph,
    Node,
    Role,
    Value,
    array_of,
    attributes,
    role_of,
    type_of,
    where,
)
from onward.graph.ops import OPS
from onward.graph.types import Dim, product

_MOVES = ("Concat", "Split", "Slice", "Gather", "Pad")  # no number of theirs is of two samples
_SOFTMAXES = ("SoftmaxCrossEntropyLoss", "CrossEntropyLoss", "Softmax", "LogSoftmax")


def mixed_samples(graph: Graph) -> str | None:
    """Names the op by which the loss of one sample depends on other samples; None without one.

    In a graph for any number of samples, all such ops are found. In one for a fixed number, only
    BatchNorm and labels that number the samples are, as in contrastive losses; in one for a single
    sample, also ops that would read other samples if there were any.
    """
    samples, values = samples_of(graph), averaged(graph)
    if samples.isdigit():
        return _numbered(values, int(samples)) or _batch_norm(values) or _alone(values, samples)
    found = [_mixing(values, symbol) for symbol in _counted(graph, values)]
    if not found or None in found:  # samples may lie along another dim than 0, as in [T,B]
        return None
    assert found[0] is not None
    return _reads_all(found[0])


def _reads_all(node: Node) -> str:
    path = where(node)
    return f"{node.op_type}{f' in {path}' if path else ''} reads all samples of the batch"


def _numbered(values: Sequence[Value], samples: int) -> str | None:
    """Says that the labels of a cross entropy are the numbers of so many samples; None else."""
    for labels in map(array_of, values):
        if labels is None or labels.dtype.kind not in "iu":
            continue
        if samples > 1 and labels.size == len(np.unique(labels)) == samples:
            return "the labels of its cross entropy are the numbers of the samples"
    return None


def _batch_norm(values: Sequence[Value]) -> str | None:
    """Names a batch norm of the batch's own statistics that the values depend on."""
    return next((_reads_all(node) for node in _nodes(values) if _is_batch_norm(node)), None)


def _alone(values: Sequence[Value], samples: str) -> str | None:
    """Says what would read several samples if the one of this graph had others beside it: a class
    or score for each sample, constant labels, or a reduction along dim 0."""
    if samples != "1" or not values:
        return None
    for value in values:
        array = array_of(value)
        if array is not None and array.size == 1 and array.dtype.kind in "iu":
            return "its labels are constants, which may number the samples"
    if not any(isinstance(found, Value) for found in ancestors(values[:1])):
        return "its scores are constants, as a softmax over one sample is"
    uses = (use.node for value in values for use in value.uses() if use.idx == 0)
    found = next((node for node in (*uses, *_nodes(values)) if _is_of_one(node)), None)
    return None if found is None else _reads_all(found)


def _is_of_one(node: Node) -> bool:
    """Whether a node in a graph for one sample compares it with itself, or reduces along dim 0."""
    x = node.inputs[0] if node.inputs else None
    if x is None or not type_of(x).dtype.is_floating_point():
        return False
    shape = type_of(x).shape
    if node.op_type in _SOFTMAXES and len(shape) == 2 and shape[1] == 1:
        return True  # a score for each sample
    if node.op_type in ("MatMul", "Gemm") and type_of(node.outputs[0]).shape == (1, 1):
        assert node.inputs[1] is not None
        inputs = (found for found in ancestors([node.inputs[1]]) if isinstance(found, Value))
        return any(role_of(found) is Role.BATCH for found in inputs)  # of each pair of samples
    axes = None if node.op_type in _MOVES else OPS[node.op_type].axes(node)
    return len(shape) > 1 and axes is not None and 0 in axes and shape[0] == 1


def _counted(graph: Graph, values: Sequence[Value]) -> list[str]:
    """The symbols of the batch's sizes that the values have: one of them numbers the samples."""
    sizes = [size for x in graph.inputs_with(Role.BATCH) for size in type_of(x).shape]
    symbols = dict.fromkeys(str(size) for size in sizes if isinstance(size, Dim))
    held = [product(type_of(value).shape) for value in values]
    return [symbol for symbol in symbols if any(_power(size, symbol) for size in held)]


def _mixing(values: Sequence[Value], symbol: str) -> Node | None:
    """A node that the values depend on and that reads several elements along this size at once."""
    for value in values:
        for use in value.uses():
            is_head = use.node.op_type == "LinearCrossEntropy" and use.idx == 1
            if is_head and _power(product(type_of(value).shape), symbol):
                return use.node  # a class for each
    return next((node for node in _nodes(values) if _mixes(node, symbol)), None)


def _nodes(values: Sequence[Value]) -> Iterator[Node]:
    """The nodes that values depend on."""
    return (found for found in ancestors(values) if isinstance(found, Node))


def _mixes(node: Node, symbol: str) -> bool:
    """Whether a number that a node computes depends on several elements along this size."""
    x = node.inputs[0] if node.inputs else None
    if x is None or not type_of(node.outputs[0]).dtype.is_floating_point():
        return False
    if _power(product(type_of(node.outputs[0]).shape), symbol) > 1:
        return True  # a row and a column for each
    shape = type_of(x).shape
    if node.op_type in ("MatMul", "Gemm"):
        return _power(shape[0 if attributes(node).get("transA") else -1], symbol) > 0
    if _is_batch_norm(node):
        return any(_power(size, symbol) for size in shape)
    axes = None if node.op_type in _MOVES else OPS[node.op_type].axes(node)
    return axes is not None and any(_power(shape[axis], symbol) for axis in axes)


def _is_batch_norm(node: Node) -> bool:
    return node.op_type == "BatchNormalization" and bool(attributes(node).get("training_mode"))


def _power(size: Dim | int, symbol: str) -> int:
    """The highest power of a symbol in a size."""
    if not isinstance(size, Dim):
        return 0
    return max((list(names).count(symbol) for names, _ in size.terms), default=0)


__all__ = ["mixed_samples"]
