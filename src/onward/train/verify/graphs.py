"""Graphs for a comparison: their gradients by the user's names, and copies without dropout."""

from __future__ import annotations

from onward.graph.graph import Graph, make_attributes, type_of
from onward.graph.names import user_name

LOSS = "loss"


def gradient(parameter: str) -> str:
    """What the gradient by a graph input is called in rows: `grad.w` for `param.w`."""
    return f"grad.{user_name(parameter)}"


def next_value(buffer: str) -> str:
    """What the next value of a buffer, by its graph input, is called in rows."""
    return f"next.{user_name(buffer)}"


def compared_outputs(graph: Graph) -> dict[str, str]:
    """The graph's loss and gradients, and the running statistics and the like that it writes, by
    what they are called in rows."""
    signature = graph.signature
    loss = {} if signature.loss is None else {LOSS: signature.loss}
    gradients = {gradient(name): made for name, made in signature.gradients.items()}
    floating = {n: y for n, y in signature.written.items() if type_of(graph.outputs[y]).is_floating}
    return loss | gradients | {next_value(name): made for name, made in floating.items()}


def without_dropout(graph: Graph) -> Graph:
    """A copy in which every dropout passes its input on."""
    graph = graph.clone()
    for node in list(graph):
        if node.op_type == "Dropout":
            assert node.inputs[0] is not None
            graph.replace(node.outputs[0], node.inputs[0])
            graph.remove([node])
        elif "ratio" in node.attributes:  # a dropout inside the op
            node.attributes["ratio"] = make_attributes({"ratio": 0.0})[0]
    return graph
