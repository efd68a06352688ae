"""`Reshape(Transpose(x))  =>  Transpose(Reshape(x))` where the Reshape only splits dims.

Reshapes then meet and cancel each other's merging of dims, so that attention heads of a projection
(`[T*B,E] -> [T,B*H,K] -> [B*H,T,K] -> [B,H,T,K]`) become strides on the product's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.graph.ops import named
from onward.graph.types import Size, product

RESHAPES = named("reshapes")


def reshape_through_transpose(graph: Graph) -> int:
    """Moves Reshapes before Transposes, and joins those that meet, until none can move."""
    edits = 0
    while True:
        moved = sum(_moved(graph, node) for node in list(graph))
        if not moved:
            return edits
        edits += moved


def _moved(graph: Graph, node: Node) -> int:
    if node.op_type not in (*RESHAPES, "Transpose"):
        return 0
    y = node.outputs[0]
    if not (y.uses() or y in graph.output_values()):
        return 0  # removed in an earlier round
    b = Builder.at(graph, node)
    new = _only_ones_move(b, node) if node.op_type == "Transpose" else _before_transpose(b, node)
    if new is None:
        return 0
    graph.replace(y, new)
    graph.remove([node])
    return 1


def _before_transpose(b: Builder, reshape: Node) -> Value | None:
    y, shape = reshape.inputs[0], type_of(reshape.outputs[0]).shape
    before = y.producer() if y is not None else None
    if y is None or before is None or before.inputs[0] is None:
        return None
    if before.op_type in RESHAPES:
        return _reshaped(b, y, shape)
    if before.op_type != "Transpose":
        return None
    x, perm = before.inputs[0], order_of(before)
    groups = refined(type_of(before.outputs[0]).shape, shape)
    if groups is None:
        return None
    # order of the new dims in x
    order = [d for i in range(len(perm)) for d in groups[perm.index(i)]]
    taken_apart = _reshaped(b, x, [shape[d] for d in order])
    return _transposed(b, taken_apart, [order.index(d) for d in range(len(order))])


def _only_ones_move(b: Builder, transpose: Node) -> Value | None:
    """The Reshape that equals a Transpose which moves only dims of size 1; None for other
    Transposes."""
    x = transpose.inputs[0]
    if x is None:
        return None
    kept = [d for d in order_of(transpose) if type_of(x).shape[d] != 1]
    if kept != sorted(kept):
        return None
    return _reshaped(b, x, type_of(transpose.outputs[0]).shape)


def _reshaped(b: Builder, x: Value, shape: Sequence[Size]) -> Value:
    """Reshapes x, from the source of any Reshapes that made it."""
    while (node := x.producer()) is not None and node.op_type in RESHAPES:
        assert node.inputs[0] is not None
        x = node.inputs[0]
    return b.reshape(x, tuple(shape))


def _transposed(b: Builder, x: Value, perm: list[int]) -> Value:
    """Transposes x, joined with a Transpose that made it."""
    node = x.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        first = order_of(node)
        return b.transpose(node.inputs[0], [first[i] for i in perm])
    return b.transpose(x, perm)


def order_of(transpose: Node) -> list[int]:
    """The `perm` of a Transpose; by default it reverses the dims."""
    rank = type_of(transpose.inputs[0]).rank
    return attributes(transpose).get("perm") or list(reversed(range(rank)))


def refined(have: Sequence[Size], shape: Sequence[Size]) -> list[list[int]] | None:
    """The dims of `shape` that each dim of `have` is split into; None where dims are merged.

    Dims of size 1 may appear or vanish: `[6,1,T] -> [2,3,1,T]` is `[[0,1], [], [2,3]]`.
    """
    groups: list[list[int]] = []
    at = 0
    for size in have:
        group: list[int] = []
        while size != 1 and (product(shape[d] for d in group) != size or not group):
            if at == len(shape):
                return None
            group.append(at)
            at += 1
        groups.append(group)
    if any(n != 1 for n in shape[at:]):
        return None
    last = next((g for g in reversed(groups) if g), None)
    if last is None:
        return None  # a tensor of one element
    last.extend(range(at, len(shape)))
    return groups
