"""Graphs for a comparison: the names of their results in rows, and copies without dropout."""

from __future__ import annotations

from onward.graph.graph import Graph, make_attributes, type_of
from onward.graph.names import user_name

LOSS = "loss"


def gradient(parameter: str) -> str:
    """The name of a gradient in rows: `grad.w` for the graph input `param.w`."""
    return f"grad.{user_name(parameter)}"


def next_value(buffer: str) -> str:
    """The name of a buffer's next value in rows: `next.mean` for the graph input `buffer.mean`."""
    return f"next.{user_name(buffer)}"


def compared_outputs(graph: Graph) -> dict[str, str]:
    """The outputs to compare, by their names in rows: the loss, gradients, and next values of
    floating buffers, such as running statistics."""
    signature = graph.signature
    loss = {} if signature.loss is None else {LOSS: signature.loss}
    gradients = {gradient(name): made for name, made in signature.gradients.items()}
    floating = {n: y for n, y in signature.written.items() if type_of(graph.outputs[y]).is_floating}
    return loss | gradients | {next_value(name): made for name, made in floating.items()}


def without_dropout(graph: Graph) -> Graph:
    """A copy of the graph in which every dropout returns its input."""
    graph = graph.clone()
    for node in list(graph):
        if node.op_type == "Dropout":
            assert node.inputs[0] is not None
            graph.replace(node.outputs[0], node.inputs[0])
            graph.remove([node])
        elif "ratio" in node.attributes:  # a dropout inside the op
            node.attributes["ratio"] = make_attributes({"ratio": 0.0})[0]
    return graph
