"""`a = f(x); b = f(x)  =>  b := a`."""

from __future__ import annotations

from typing import Any

from onward.graph.graph import Graph, Node, Value, attributes, precision_said


def _key(node: Node, early: bool) -> tuple[Any, ...]:
    """A key such that nodes with equal keys compute equal values. A random op's site is an
    attribute, so that different sites never merge. early: also include the precision that autocast
    blocks of the model ask for, which casts do not express yet."""
    attrs = tuple(sorted((k, repr(v)) for k, v in attributes(node).items()))
    inputs = tuple(None if v is None else id(v) for v in node.inputs)
    said = precision_said(node) if early else ""
    return (node.domain, node.op_type, inputs, attrs, said)


def common_subexpression_elimination(graph: Graph) -> int:
    """Merges nodes that compute equal values into the first of them."""
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
