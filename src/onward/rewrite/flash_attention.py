"""`Attention(q, k, v, ...)  =>  FlashAttention(q, k, v, ...)`, whose gradient keeps no scores."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, attributes, type_of
from onward.graph.types import DType
from onward.rewrite.context import Context


def flash_attention(graph: Graph, context: Context) -> int:
    """Left as it is: an added mask that may be trained, and what no kernel takes."""
    edits = 0
    trained = _reached_from_parameters(graph)
    for node in list(graph):
        if node.op_type == "Softmax" and (why := node.meta.get("unfused")):
            context.missed(node, "FlashAttention", why)
        if node.op_type != "Attention" or not _fits(node, trained, context):
            continue
        b = Builder.at(graph, node)
        y, _, _ = b.FlashAttention(*node.inputs, **attributes(node))
        graph.replace(node.outputs[0], y)
        graph.remove([node])
        edits += 1
    return edits


def _fits(node: Node, trained: set[Value], context: Context) -> bool:
    q, k, v, mask = [*node.inputs, None][:4]
    leading = [type_of(x).shape[:-2] for x in (q, k, v)]
    if leading[1] != leading[2] or leading[0][:-1] != leading[1][:-1]:
        return context.missed(node, "FlashAttention", "sequences share keys")
    if mask is not None and type_of(mask).dtype != DType.BOOL and mask in trained:
        reason = "its mask may be trained, whose gradient is as large as the scores"
        return context.missed(node, "FlashAttention", reason)
    return context.takes(node, "FlashAttention", node.inputs, attributes(node))


def _reached_from_parameters(graph: Graph) -> set[Value]:
    """Floating values through which a parameter may take a gradient."""
    reached = set(graph.inputs_with(Role.PARAM))
    for node in graph:
        if any(x in reached for x in node.inputs) and not node.meta.get("stop_gradient"):
            reached.update(y for y in node.outputs if type_of(y).is_floating)
    return reached
