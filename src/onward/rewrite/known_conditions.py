"""`Range(0, n) >= 0  =>  true`, and so `And(x, true)  =>  x`, `Where(true, a, b)  =>  a`.

Masks compare positions with limits that no position reaches, to give a truth the mask's shape; and
exporters write what an index below zero would mean beside indices that count from zero.
"""

from __future__ import annotations

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, array_of, type_of
from onward.graph.types import DType

POSITIONS = (1 << 31) - 1  # no dim is longer
# ops whose result has no number that their first input lacks
_PARTS = ("Gather", "GatherElements", "GatherND", "Slice", "Split")
_VIEWS = ("Unsqueeze", "Squeeze", "Reshape", "Expand", "Identity", "Transpose")
# the truth of `x op c` where no x is below c, and where each is above it; None: not known
_NONE_BELOW = {"GreaterOrEqual": True, "Less": False}
_ALL_ABOVE = {**_NONE_BELOW, "Greater": True, "LessOrEqual": False, "Equal": False}
_MIRRORED = {
    "GreaterOrEqual": "LessOrEqual", "LessOrEqual": "GreaterOrEqual", "Greater": "Less",
    "Less": "Greater", "Equal": "Equal",
}  # fmt: skip


def known_conditions(graph: Graph) -> int:
    """Replaces comparisons whose result is known, and the logic of such results."""
    edits = 0
    for node in list(graph):
        if len(node.outputs) != 1 or len(node.inputs) < 2:
            continue
        new = _settled(graph, node)
        if new is not None:
            graph.replace(node.outputs[0], new)
            graph.remove([node])
            edits += 1
    return edits


def _settled(graph: Graph, node: Node) -> Value | None:
    """The value in place of a node's; None where it stays."""
    inputs = [x for x in node.inputs if x is not None]
    if node.op_type in _ALL_ABOVE:
        truth = _compared(node.op_type, *inputs)
        return None if truth is None else _full(graph, node, truth)
    if node.op_type in ("And", "Or"):
        for x, other in (inputs, inputs[::-1]):
            truth = _literal(other)
            if truth is not None:
                neutral = truth is (node.op_type == "And")
                return _as(graph, node, x) if neutral else _full(graph, node, truth)
    if node.op_type == "Where":
        truth = _literal(inputs[0])
        return None if truth is None else _as(graph, node, inputs[1 if truth else 2])
    return None


def _compared(op_type: str, x: Value, limit: Value) -> bool | None:
    """The truth of a comparison, the same in all places; None where it is not known."""
    if array_of(x) is not None:
        x, limit, op_type = limit, x, _MIRRORED[op_type]
    array = array_of(limit)
    if array is None or not array.size or array.dtype.kind not in "iu":
        return None
    bounds = _bounds(x)
    if bounds is None or bounds[0] < int(array.max()):
        return None
    return (_NONE_BELOW if bounds[0] == int(array.max()) else _ALL_ABOVE).get(op_type)


def _bounds(x: Value) -> tuple[int, int] | None:
    """Numbers that no element of a whole value is below, and above; None where they are not known,
    or where the type does not hold them."""
    type, array, node = type_of(x), array_of(x), x.producer()
    if type.dtype not in (DType.INT32, DType.INT64):
        return None
    if array is not None:
        return (int(array.min()), int(array.max())) if array.size else None
    inputs = [v for v in node.inputs if v is not None] if node is not None else []
    if node is None or not inputs:
        return None
    if node.op_type in ("Shape", "Size"):
        return 0, POSITIONS
    if node.op_type == "Range":
        start, step = array_of(inputs[0]), array_of(inputs[2])
        if start is None or step is None or step.item() <= 0:
            return None
        return int(start.item()), POSITIONS
    if node.op_type in (*_VIEWS, *_PARTS):
        return _bounds(inputs[0])
    if node.op_type in ("Add", "Mul"):
        pairs = [_bounds(v) for v in inputs]
        if None in pairs or min(pair[0] for pair in pairs if pair) < 0:
            return None
        (low, high), (low_2, high_2) = (pair for pair in pairs if pair)
        made = (
            (low + low_2, high + high_2) if node.op_type == "Add" else (low * low_2, high * high_2)
        )
        return made if made[1] <= np.iinfo(type.dtype.numpy()).max else None
    return None


def _literal(x: Value) -> bool | None:
    """The truth that a value holds in all places; None where it is not known."""
    node, array = x.producer(), array_of(x)
    if array is None and node is not None and node.op_type in _VIEWS and node.inputs[0] is not None:
        return _literal(node.inputs[0])
    if array is None or array.dtype.kind != "b" or not array.size:
        return None
    return bool(array.flat[0]) if (array == array.flat[0]).all() else None


def _full(graph: Graph, node: Node, truth: bool) -> Value:
    type = type_of(node.outputs[0])
    b = Builder.at(graph, node)
    return b.expand(b.scalar(truth, type.dtype), type.shape)


def _as(graph: Graph, node: Node, x: Value) -> Value:
    """A value in the shape of a node's result."""
    shape = type_of(node.outputs[0]).shape
    return x if type_of(x).shape == shape else Builder.at(graph, node).expand(x, shape)


__all__ = ["known_conditions"]
