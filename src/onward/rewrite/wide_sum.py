"""`Add(Cast(a), Add(Cast(b), c))  =>  WideSum(a, b, c)`: gradients that arrive at one value, those
of low products in bf16 or fp16, are read as they are and added in f32 in one pass over memory.

Before, each was written in f32, and each sum too. As many bits as with the sums in this order.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.graph.ops.wide_sum import MOST
from onward.graph.types import DType
from onward.rewrite.context import Context
from onward.rewrite.matching import made_by, widened


def wide_sum(graph: Graph, context: Context) -> int:
    edits, outputs = 0, graph.output_values()
    removed: set[Node] = set()
    for node in reversed(list(graph)):  # the last sum first, which takes those before it
        if node in removed or node.op_type != "Add" or not _is_sum(node):
            continue
        nodes: list[Node] = []
        terms = _terms(node, nodes, outputs)
        low = [source for x in terms if (source := _low(x)) is not None]
        wide = [x for x in terms if _low(x) is None]
        if not low or len(low) + len(wide) > MOST or len({type_of(x).dtype for x in low}) > 1:
            continue
        shape = type_of(node.outputs[0]).shape
        types = [type_of(x).with_shape(shape) for x in (*low, *wide)]
        if not context.takes(node, "WideSum", types, {}, gradient=False):
            continue
        b = Builder.at(graph, node)
        y = b.WideSum(*(b.reshape(x, shape) for x in (*low, *wide)))
        graph.replace(node.outputs[0], y)
        graph.remove(nodes)
        removed.update(nodes)
        for x in dict.fromkeys(terms):
            _remove_unread(graph, x, outputs)
        edits += 1
    return edits


def _remove_unread(graph: Graph, x: Value, outputs: set[Value]) -> None:
    """Removes the cast that made x, and Reshapes after it, where nothing reads them any more."""
    maker = x.producer()
    while maker is not None and maker.op_type in ("Reshape", "Cast"):
        if maker.outputs[0] in outputs or maker.outputs[0].uses():
            return
        source = maker.inputs[0]
        graph.remove([maker])
        maker = None if source is None else source.producer()


def _terms(node: Node, nodes: list[Node], outputs: set[Value]) -> list[Value]:
    """The terms of a sum, from left to right. nodes: gets its Adds and the Reshapes between them,
    readers first."""
    nodes.append(node)
    found: list[Value] = []
    for x in node.inputs:
        assert x is not None
        between, inner = _sum_before(x, outputs)
        if inner is None:
            found.append(x)
            continue
        nodes += between
        found += _terms(inner, nodes, outputs)
    return found


def _sum_before(x: Value, outputs: set[Value]) -> tuple[list[Node], Node | None]:
    """The Add that computes x for one reader, directly or reshaped, and the Reshapes between."""
    between: list[Node] = []
    while x not in outputs and len(x.uses()) == 1 and (maker := x.producer()) is not None:
        if maker.op_type == "Add" and _is_sum(maker):
            return between, maker
        if maker.op_type != "Reshape" or maker.inputs[0] is None:
            break
        between.append(maker)
        x = maker.inputs[0]
    return [], None


def _is_sum(node: Node) -> bool:
    """Whether an Add is of f32, and nothing is broadcast."""
    y = type_of(node.outputs[0])
    return y.dtype == DType.FLOAT and all(x is not None and type_of(x) == y for x in node.inputs)


def _low(x: Value) -> Value | None:
    """The value of low precision that x is cast from, directly or reshaped; None where x is no such
    cast."""
    while (view := made_by(x, "Reshape")) is not None and view.inputs[0] is not None:
        x = view.inputs[0]
    return widened(x)


__all__ = ["wide_sum"]
