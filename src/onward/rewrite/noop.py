"""Removes nodes that change nothing: `x + 0`, `x * 1`, `Reshape(Reshape(x))`, casts to the same
type, and transposes of a product that can be computed transposed."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, array_of, attributes, type_of
from onward.graph.ops import named

_RESHAPES = named("reshapes")
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}


def noop(graph: Graph) -> int:
    """Removes nodes that change nothing, and joins chains of reshapes and of transposes."""
    edits, trained = 0, _trained(graph)
    for node in list(graph):
        new = _unchanged(node, trained) or _joined(graph, node)
        if new is None:
            continue
        if node.outputs[0] in trained:
            trained.add(new)  # `new` may be the result of a node just made
        graph.replace(node.outputs[0], new)
        graph.remove([node])
        edits += 1
    return edits


def _trained(graph: Graph) -> set[Value]:
    """The floating values that may pass a gradient to a floating input. Empty if no node stops
    gradients, since it is not needed then."""
    if all(node.op_type != "StopGradient" for node in graph):
        return set()
    found = {x for x in graph.inputs if type_of(x).is_floating}
    for node in graph:
        if node.op_type != "StopGradient" and any(x in found for x in node.inputs):
            found.update(y for y in node.outputs if type_of(y).is_floating)
    return found


def _unchanged(node: Node, trained: set[Value]) -> Value | None:
    """The input that the node returns unchanged; None where it changes it."""
    if len(node.outputs) != 1 or not node.inputs or node.inputs[0] is None:
        return None
    x, y = node.inputs[0], node.outputs[0]
    same = type_of(x) == type_of(y)
    match node.op_type:
        case "Identity":
            return x
        case "StopGradient":
            return None if x in trained else x
        case "Reshape" | "Expand" | "Cast" | "Squeeze" | "Unsqueeze" | "Slice" if same:
            return x
        case "Transpose":
            perm = attributes(node).get("perm")
            return x if perm == sorted(perm or [1, 0]) else None
        case "Concat" if len(node.inputs) == 1:
            return x
        case "Add" | "Sub" | "Mul" | "Div":
            return _neutral(node)
        case _:
            return None


def _neutral(node: Node) -> Value | None:
    """The operand x of `x + 0`, `x - 0`, `x * 1` or `x / 1`; the constant may stand first in a sum
    or a product."""
    number = _NEUTRAL[node.op_type]
    pairs = [node.inputs, node.inputs[::-1]] if node.op_type in ("Add", "Mul") else [node.inputs]
    for x, c in pairs:
        array = array_of(c)
        if array is None or x is None or type_of(x) != type_of(node.outputs[0]):
            continue
        if array.size == 1 and array.reshape(-1)[0] == number:
            return x
    return None


def _joined(graph: Graph, node: Node) -> Value | None:
    x = node.inputs[0] if node.inputs else None
    before = x.producer() if x is not None else None
    if before is None or before.inputs[0] is None:
        return None
    source = before.inputs[0]
    b = Builder.at(graph, node)
    if node.op_type in _RESHAPES and before.op_type in _RESHAPES:
        return b.reshape(source, type_of(node.outputs[0]).shape)
    if node.op_type == "Transpose" and before.op_type == "Transpose":
        first, then = _order(before), _order(node)
        return b.transpose(source, [first[i] for i in then])
    if node.op_type == "Transpose" and before.op_type == "GroupedOuter":
        outputs = graph.outputs.values()
        alone = x is not None and len(x.uses()) == 1 and all(x is not y for y in outputs)
        if alone and _order(node) == [0, 2, 1]:  # (x^T dy)^T = dy^T x
            return b.GroupedOuter(before.inputs[1], source, before.inputs[2])
    return None


def _order(transpose: Node) -> list[int]:
    """The `perm` of a Transpose; by default it reverses the dims."""
    rank = type_of(transpose.inputs[0]).rank
    return attributes(transpose).get("perm") or list(reversed(range(rank)))
