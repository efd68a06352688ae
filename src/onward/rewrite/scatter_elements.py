"""`ScatterND(x, i, rows, add)  =>  ScatterElements(x, i expanded, rows, add)`, for other engines.

On several threads onnxruntime's ScatterND on the CPU loses terms where two of its indices are
equal, without a word: an embedding's gradient is then wrong wherever a token occurs twice. Its
ScatterElements adds one element after another. This pass is in no list; portable graphs need it.
"""

from __future__ import annotations

import math

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.graph.types import DType


def scatter_elements(graph: Graph) -> int:
    """Replaces each ScatterND that adds, multiplies or takes extrema; returns how many."""
    edits = 0
    for node in list(graph):
        if node.op_type != "ScatterND" or attributes(node).get("reduction", "none") == "none":
            continue
        graph.replace(node.outputs[0], _by_elements(Builder.at(graph, node), node))
        graph.remove([node])
        edits += 1
    return edits


def _by_elements(b: Builder, node: Node) -> Value:
    """Writes one ScatterND as a ScatterElements along dim 0 of x, whose indexed dims are joined."""
    x, index, rows = node.inputs
    assert x is not None and index is not None and rows is not None
    kind = type_of(x)
    depth = type_of(index).shape[-1]
    assert isinstance(depth, int), "the depth of an index is a number"
    count, inner = math.prod(type_of(index).shape[:-1]), kind.shape[depth:]
    place: Value | None = None
    for dim, size in enumerate(kind.shape[:depth]):
        at = b.reshape(b.slice(index, type_of(index).rank - 1, dim, dim + 1), (count,))
        if depth > 1:  # from the front, so that places can be joined
            at = b.Where(b.Less(at, b.scalar(0, DType.INT64)), b.Add(at, b.size(size)), at)
        place = at if place is None else b.Add(b.Mul(place, b.size(size)), at)
    assert place is not None, "an index has at least one column"
    place = b.expand(b.reshape(place, (count, *[1] * len(inner))), (count, *inner))
    flat = b.reshape(x, (math.prod(kind.shape[:depth]), *inner))
    y = b.ScatterElements(
        flat,
        place,
        b.reshape(rows, (count, *inner)),
        axis=0,
        reduction=attributes(node)["reduction"],
    )
    return b.reshape(y, kind.shape)


__all__ = ["scatter_elements"]
