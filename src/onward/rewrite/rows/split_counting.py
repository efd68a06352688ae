"""Splits a packed graph into one that counts the batch's rows and the step that uses the counts."""

from __future__ import annotations

from onward.graph.graph import Graph, Role, type_of
from onward.graph.signature import Signature
from onward.rewrite.dead_code_elimination import dead_code_elimination


def split_counting(graph: Graph) -> tuple[Graph, Graph]:
    """Splits a graph into `row_conditions(graph)` and `with_rows_given(graph)`."""
    return row_conditions(graph), with_rows_given(graph)


def row_conditions(graph: Graph) -> Graph:
    """A graph from the batch to a mask `b[N]` for each set of rows, an output each, named by the
    set's size."""
    conditions = graph.clone()
    conditions.outputs, conditions.state, conditions.signature = {}, {}, Signature()
    conditions.counts = set()  # this graph counts nothing
    for node in conditions:
        if node.op_type == "Rows" and node.inputs[0] is not None:
            conditions.outputs[str(type_of(node.outputs[0]).shape[0])] = node.inputs[0]
    dead_code_elimination(conditions)
    return conditions


def with_rows_given(graph: Graph) -> Graph:
    """A copy of the graph with the row indices as inputs (`Signature.rows`)."""
    step = graph.clone()
    step.counts = set()
    for node in list(step):
        if node.op_type == "Rows":
            type = type_of(node.outputs[0])
            size = str(type.shape[0])
            rows = step.input(f"rows.{size}", type, Role.BATCH)
            step.signature = step.signature.but(rows={size: rows.name})
            step.replace(node.outputs[0], rows)
            step.remove([node])
    return step
