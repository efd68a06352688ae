"""Conditions of a graph on its open sizes: `x[:, :5]` is 5 steps long where T is 5 or more, and as
long as x where it is less.

The reader takes each cut to lie within the size that it cuts, and this module finds where that is a
condition on the batch. A graph is run with sizes from 2 on that fulfil all of them; for others the
model is read anew with these sizes as numbers, by which every cut is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from onward.graph.graph import Graph, Node, attributes, content_of, type_of
from onward.graph.types import Dim, Size, substitute, symbol

SMALLEST = 2  # open size; those below broadcast, and are numbers of a graph
FEW = 16  # factors in all of a size that is written out


def conditions(graph: Graph) -> list[Dim]:
    """The sizes that have to be 0 or more for a graph to compute what its model does, each once;
    without those that are so for all sizes from 2 on."""
    found: dict[Dim, None] = {}
    for node in graph:
        rule = _RULES.get(node.op_type)
        for size in () if rule is None else rule(node):
            if isinstance(size, Dim) and not is_never_negative(size):
                found[size] = None
    return list(found)


def is_never_negative(size: Size) -> bool:
    """Whether a size is 0 or more wherever its symbols are 2 or more; False also where that is not
    known."""
    if isinstance(size, int):
        return size >= 0
    if all(factor > 0 for _, factor in size.terms):
        return True
    if sum(len(names) for names, _ in size.terms) > FEW:
        return False
    above = substitute(size, {name: symbol(name) + SMALLEST for name in size.symbols})
    return isinstance(above, Dim) and all(factor > 0 for _, factor in above.terms)


def broken(sizes: Iterable[Dim], dims: Mapping[str, int]) -> set[str]:
    """The symbols of the conditions that do not hold at these sizes; a condition on a symbol that
    has no size here is left out."""
    return {
        name
        for size in sizes
        if size.symbols <= dims.keys() and size.number(dims) < 0
        for name in size.symbols
    }


# ---- by op


def _slice(node: Node) -> Iterator[Size]:
    """0 <= start <= end <= size along each axis, where the ends are known."""
    starts, ends, axes, *_ = (content_of(x) for x in (*node.inputs[1:], None))
    shape = type_of(node.inputs[0]).shape
    if starts is None or ends is None:
        return
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        size = shape[int(axes[i]) if axes is not None else i]  # type: ignore[arg-type]
        yield from (start, end - start, size - end)


def _split(node: Node) -> Iterator[Size]:
    """The parts add up to the whole."""
    sizes = content_of(node.inputs[1])
    if sizes is not None:
        shape = type_of(node.inputs[0]).shape
        yield from _equal(shape[attributes(node).get("axis", 0) % len(shape)], sum(sizes))


def _squeeze(node: Node) -> Iterator[Size]:
    """A dim that is dropped has size 1, and one that is kept where none is named has another."""
    shape = type_of(node.inputs[0]).shape
    axes = content_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None:
        yield from (size - SMALLEST for size in shape if not isinstance(size, int))
        return
    for axis in axes:
        yield from _equal(1, shape[int(axis) % len(shape)])  # type: ignore[arg-type]


def _concat(node: Node) -> Iterator[Size]:
    """Parts are alike but for the dim along which they are joined."""
    first, *others = (type_of(x).shape for x in node.inputs)
    axis = attributes(node)["axis"] % max(len(first), 1)
    for other in others:
        for i, (a, b) in enumerate(zip(first, other, strict=True)):
            if i != axis:
                yield from _equal(a, b)


def _top_k(node: Node) -> Iterator[Size]:
    count = content_of(node.inputs[1])
    shape = type_of(node.inputs[0]).shape
    if count:
        yield shape[attributes(node).get("axis", -1) % len(shape)] - count[0]


def _range(node: Node) -> Iterator[Size]:
    yield from type_of(node.outputs[0]).shape


def _equal(a: Size, b: Size) -> Iterator[Size]:
    yield from (a - b, b - a)


_RULES: dict[str, Callable[[Node], Iterator[Size]]] = {
    "Concat": _concat, "Range": _range, "Slice": _slice, "Split": _split, "Squeeze": _squeeze,
    "TopK": _top_k,
}  # fmt: skip

__all__ = ["broken", "conditions", "is_never_negative"]
