"""Prints a graph, one line per node, with types.

graph step(%input_ids: i64[B,T] batch, %w: f32[100,8] param)
  %gather_1: f32[B,T,8] = Gather(%w, %input_ids) {axis=0}   # transformer.wte
-> loss=%softmax_9: f32[]
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from onward.graph.graph import Graph, Node, Value, array_of, attributes, role_of, type_of, where


def name_of(value: Value | None) -> str:
    """`%x`, a small constant's digits, or `_` for an absent input."""
    if value is None:
        return "_"
    array = array_of(value)
    if array is not None and array.size <= 8:
        return np.array2string(array, separator=",", max_line_width=10_000).replace(" ", "")
    return f"%{value.name}"


def node_text(node: Node) -> str:
    """A node with its output types, attributes and module path."""
    outputs = ", ".join(f"%{v.name}: {type_of(v)}" for v in node.outputs)
    inputs = ", ".join(name_of(v) for v in node.inputs)
    domain = f"{node.domain}." if node.domain else ""
    attrs = ", ".join(f"{k}={v}" for k, v in sorted(attributes(node).items()))
    line = f"{outputs} = {domain}{node.op_type}({inputs})"
    if attrs:
        line += f" {{{attrs}}}"
    return line + (f"   # {where(node)}" if where(node) else "")


def graph_text(graph: Graph) -> str:
    """A whole graph as text; equal graphs print alike."""
    lines = [f"graph {graph.name}("]
    for value in graph.inputs:
        role = role_of(value)
        lines.append(f"  %{value.name}: {type_of(value)} {role.value if role else ''},")
    lines.append(")")
    for value in graph.ir.initializers.values():
        lines.append(f"  %{value.name}: {type_of(value)} = constant")
    lines += [f"  {node_text(node)}" for node in graph]
    for name, value in graph.outputs.items():
        state = f" -> %{graph.state[name].name}" if name in graph.state else ""
        lines.append(f"-> {name}={name_of(value)}: {type_of(value)}{state}")
    return "\n".join(lines) + "\n"


def count_ops(graph: Graph) -> Counter[str]:
    """Counts nodes by op; an own op is `onward::Name`."""
    return Counter(op_name(node.domain, node.op_type) for node in graph)


def op_name(domain: str, op: str) -> str:
    """An op's name, with its domain unless that is the ONNX standard's."""
    return f"{domain}::{op}" if domain else op
