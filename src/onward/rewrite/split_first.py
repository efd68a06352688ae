"""`Split(Transpose(x))  =>  Transpose(Split(x)...)`, `Split(Reshape(x))  =>  Reshape(Split(x)...)`.

A packed projection is then split in the layout that its product wrote, and its gradient is one
Concat there.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, content_of, type_of
from onward.graph.types import Size, product
from onward.rewrite.reshape_through_transpose import RESHAPES, order_of, refined


def split_first(graph: Graph) -> int:
    """Moves each Split before the views that it reads."""
    edits = 0
    for node in list(graph):
        while node.op_type == "Split" and (moved := _moved(graph, node)) is not None:
            node = moved
            edits += 1
    return edits


def _moved(graph: Graph, split: Node) -> Node | None:
    """The Split of a view's source that replaces the Split of the view; None where there is
    none."""
    y = split.inputs[0]
    before = y.producer() if y is not None else None
    x = before.inputs[0] if before is not None and before.inputs else None
    sizes = content_of(split.inputs[1]) if len(split.inputs) > 1 else None
    if before is None or y is None or x is None or sizes is None:
        return None
    dim = attributes(split).get("axis", 0) % type_of(y).rank
    perm: list[int] | None = None
    if before.op_type == "Transpose":
        perm = order_of(before)
        place: tuple[int, Size] | None = (perm[dim], 1)
    elif before.op_type in RESHAPES:
        place = _outermost(type_of(x).shape, type_of(y).shape, dim)
    else:
        return None
    if place is None or not all(isinstance(n * place[1], int) for n in sizes):
        return None  # a computed size would need additional nodes
    b = Builder.at(graph, split)
    pieces: tuple[Value, ...] = b.Split(x, b.sizes([n * place[1] for n in sizes]), axis=place[0])
    for old, piece in zip(split.outputs, pieces, strict=True):
        shape = type_of(old).shape
        new = b.reshape(piece, shape) if perm is None else b.transpose(piece, perm)
        graph.replace(old, new)
    graph.remove([split])
    return pieces[0].producer()


def _outermost(
    have: tuple[Size, ...], shape: tuple[Size, ...], dim: int
) -> tuple[int, Size] | None:
    """The dim of `have` whose outermost factor is dim `dim` of `shape`, and its number of elements
    for each index of that."""
    groups = refined(have, shape)
    if groups is None or shape[dim] == 1:
        return None
    for i, group in enumerate(groups):
        if dim in group:
            outer = product(shape[d] for d in group if d < dim)
            return (i, product(shape[d] for d in group if d > dim)) if outer == 1 else None
    return None
