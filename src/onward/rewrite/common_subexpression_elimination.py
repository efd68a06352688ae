"""`a = f(x); b = f(x)  =>  b := a`."""

from __future__ import annotations

from typing import Any

from onward.graph.graph import Graph, Node, Value, attributes, precision_said


def _key(node: Node, early: bool) -> tuple[Any, ...]:
    """Equal keys compute equal values. A random op's site is an attribute, so sites never merge.
    early: what the model's autocast blocks say of a node is still to be written as casts."""
    attrs = tuple(sorted((k, repr(v)) for k, v in attributes(node).items()))
    inputs = tuple(None if v is None else id(v) for v in node.inputs)
    said = precision_said(node) if early else ""
    return (node.domain, node.op_type, inputs, attrs, said)


def common_subexpression_elimination(graph: Graph) -> int:
    """Common subexpressions: the first of equal nodes serves all."""
    first: dict[tuple[Any, ...], Node] = {}
    edits, early = 0, not graph.signature.cotangents
    for node in list(graph):
        twin = first.setdefault(_key(node, early), node)
        if twin is node:
            continue
        pairs: list[tuple[Value, Value]] = list(zip(node.outputs, twin.outputs, strict=True))
        for old, new in pairs:
            graph.replace(old, new)
        graph.remove([node])
        edits += 1
    return edits
