"""Invariants that every graph satisfies between two passes."""

from __future__ import annotations

from onward.graph.graph import MARKS, ONWARD, Graph, Value, role_of, type_of
from onward.graph.ops import OWN
from onward.graph.printer import node_text


def check(graph: Graph) -> None:
    """Raises AssertionError naming the first node that breaks a rule.

    Rules: every value is typed and defined before use, every onward op is in the table, every
    input has a role, and each state output has the type of the input it updates.
    """
    defined: set[Value] = set(graph.inputs) | set(graph.ir.initializers.values())
    for value in graph.inputs:
        assert role_of(value) is not None, f"input %{value.name} has no role"
    for node in graph:
        assert node.domain != ONWARD or node.op_type in OWN, f"unknown op: {node_text(node)}"
        unknown = node.meta.keys() - MARKS.keys()
        assert not unknown, f"{', '.join(unknown)} is noted beside {node_text(node)}"
        for value in node.inputs:
            assert value is None or value in defined, f"used before it is made: {node_text(node)}"
        for value in node.outputs:
            assert "type" in value.meta, f"no type: %{value.name} of {node.op_type} {node.name}"
            defined.add(value)
    for name, value in graph.outputs.items():
        assert value in defined, f"output {name} is not made by this graph"
    for name, source in graph.state.items():
        value = graph.outputs[name]
        assert type_of(value) == type_of(source), (
            f"state {name}: {type_of(value)} cannot replace {type_of(source)}"
        )
