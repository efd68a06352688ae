"""`x + ScatterND(0, i, rows, add)  =>  ScatterND(x, i, rows, add)`.

The gradient of an embedding that is tied to the head is the head's dense gradient plus a few rows;
this saves a second table of zeros.
"""

from __future__ import annotations

from onward.graph.build import Builder, is_zero
from onward.graph.graph import Graph, Node, Value, attributes, type_of, where


def scatter_into(graph: Graph) -> int:
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        if node.op_type != "Add":
            continue
        for base, added in (node.inputs, node.inputs[::-1]):
            scatter = _scatter_on_zeros(added)
            if scatter is None or base is None or type_of(base) != type_of(node.outputs[0]):
                continue
            if added in outputs or len(added.uses()) != 1:  # type: ignore[union-attr]
                continue
            b = Builder.at(graph, node)
            b.module = where(scatter)
            new = b.ScatterND(base, *scatter.inputs[1:], reduction="add")
            graph.replace(node.outputs[0], new)
            graph.remove([node, scatter])
            edits += 1
            break
    return edits


def _scatter_on_zeros(value: Value | None) -> Node | None:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "ScatterND" or attributes(node).get("reduction") != "add":
        return None
    data = node.inputs[0]
    return node if data is not None and is_zero(data) else None
