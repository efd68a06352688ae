"""Losses in which samples of a batch depend on each other, as in contrastive losses and batch norm.

Ranks with a share of the batch each compute another loss than one process with all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onward.differentiate.loss_sum import ancestors, averaged, samples_of
from onward.graph.graph import Graph, Node, Role, Value, array_of, attributes, type_of, where
from onward.graph.ops import OPS
from onward.graph.types import Dim, product

_MOVES = ("Concat", "Split", "Slice", "Gather", "Pad")  # no number of theirs is of two samples


def mixed_samples(graph: Graph) -> str | None:
    """The op of a forward graph by which the loss of one sample depends on others, in words; None
    where there is none. In a graph for a fixed number of samples only labels that number them are
    seen, as in a contrastive loss."""
    samples, values = samples_of(graph), averaged(graph)
    if samples.isdigit():
        return _numbered(values, int(samples))
    found = [_mixing(values, symbol) for symbol in _counted(graph, values)]
    if not found or None in found:  # samples may lie along another dim than 0, as in [T,B]
        return None
    assert found[0] is not None
    path = where(found[0])
    return f"{found[0].op_type}{f' in {path}' if path else ''} reads all samples of the batch"


def _numbered(values: Sequence[Value], samples: int) -> str | None:
    """Says that the labels of a cross entropy are the numbers of so many samples; None else."""
    for labels in map(array_of, values):
        if labels is None or labels.dtype.kind not in "iu":
            continue
        if samples > 1 and labels.size == len(np.unique(labels)) == samples:
            return "the labels of its cross entropy are the numbers of the samples"
    return None


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
    nodes = (found for found in ancestors(values) if isinstance(found, Node))
    return next((node for node in nodes if _mixes(node, symbol)), None)


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
    if node.op_type == "BatchNormalization" and attributes(node).get("training_mode"):
        return any(_power(size, symbol) for size in shape)
    axes = None if node.op_type in _MOVES else OPS[node.op_type].axes(node)
    return axes is not None and any(_power(shape[axis], symbol) for axis in axes)


def _power(size: Dim | int, symbol: str) -> int:
    """The highest power of a symbol in a size."""
    if not isinstance(size, Dim):
        return 0
    return max((list(names).count(symbol) for names, _ in size.terms), default=0)


__all__ = ["mixed_samples"]
