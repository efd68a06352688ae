"""The ids that a graph looks up, so that invalid ids at unread rows are refused too."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, array_of, role_of, type_of
from onward.graph.signature import Signature
from onward.graph.types import product
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.rows.known import batch_first, batch_values


def lookups(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """The lookups of a forward graph in its parameters: `(extremes, tables)`.

    extremes: a graph from the batch to the smallest and the largest id of each lookup, `i64[2]`.
    tables: the number of rows of each lookup's table, by its output's name.
    """
    graph = graph.clone()
    known, nodes = batch_values(graph), list(graph)
    batch_first(graph, known)
    b = Builder(graph)
    graph.outputs, graph.state, graph.signature = {}, {}, Signature()
    tables: dict[str, int] = {}
    for node in nodes:
        if node.op_type not in ("Gather", "Embedding"):
            continue
        table, ids = node.inputs[:2]
        if table is None or ids not in known or array_of(ids) is not None:
            continue
        rows = type_of(table).shape[0]
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        if role_of(table) != Role.PARAM or axis != 0 or not isinstance(rows, int):
            continue
        flat, first = b.reshape(ids, (product(type_of(ids).shape),)), b.ints([0])
        ends = [b.ReduceMin(flat, first, keepdims=1), b.ReduceMax(flat, first, keepdims=1)]
        name = f"ids.{len(tables)}"
        graph.outputs[name], tables[name] = b.Concat(*ends, axis=0), rows
    dead_code_elimination(graph)
    return graph, tables
