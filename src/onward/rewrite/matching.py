"""Questions that passes ask of a spelling: which op made a value, and which number it is."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from onward.graph.graph import Node, Value, array_of, attributes, content_of, type_of
from onward.graph.types import DType


def made_by(value: Value | None, op_type: str) -> Node | None:
    """The node of this op that computes a value; None where another does, or none."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def number_of(value: Value | None) -> float | None:
    """The number that a constant of one element is; None for other values."""
    array = array_of(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def squared(value: Value | None) -> Value | None:
    """What a value is the square of, as a product or a power; None where it is none."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in ("Mul", "Pow"):
        return None
    x, other = node.inputs
    square = x is other if node.op_type == "Mul" else number_of(other) == 2.0
    return x if square else None


def widened(value: Value | None) -> Value | None:
    """The value of low precision that a value is cast from to f32; None where it is no such
    cast."""
    cast = made_by(value, "Cast")
    source = None if cast is None else cast.inputs[0]
    if value is None or source is None or type_of(value).dtype != DType.FLOAT:
        return None
    return source if type_of(source).is_low else None


def casts_of(value: Value, outputs: Collection[Value]) -> list[Node]:
    """The nodes that read a value, where all of them are casts; else none. outputs: of the
    graph."""
    readers = list(dict.fromkeys(use.node for use in value.uses()))
    all_casts = value not in outputs and all(node.op_type == "Cast" for node in readers)
    return readers if all_casts else []


def over_the_last(node: Node) -> bool:
    """Whether a reduction goes along the last dim alone, by axes that are known."""
    rank = type_of(node.inputs[0]).rank
    axes = content_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return axes is not None and axes in ((rank - 1,), (-1,))


def other_input(node: Node, value: Value) -> Value | None:
    """The input of a node of two inputs that a value is not; None where it is both or neither."""
    first, second = node.inputs
    if (first is value) is (second is value):
        return None
    return second if first is value else first


def alike(a: Value | None, b: Value | None, depth: int = 16) -> bool:
    """Whether two values are one, or are computed by equal nodes from such values; a random op's
    site is an attribute. depth: of nodes that are looked at."""
    if a is b:
        return True
    if a is None or b is None or not depth:
        return False
    first, second = array_of(a), array_of(b)
    if first is not None and second is not None:
        return first.dtype == second.dtype and np.array_equal(first, second)
    x, y = a.producer(), b.producer()
    if x is None or y is None or a.index() != b.index():
        return False
    return (
        (x.domain, x.op_type, attributes(x)) == (y.domain, y.op_type, attributes(y))
        and len(x.inputs) == len(y.inputs)
        and all(alike(*pair, depth - 1) for pair in zip(x.inputs, y.inputs, strict=True))
    )


__all__ = ["alike", "made_by", "number_of", "other_input", "over_the_last", "squared"]
