"""`Attention(q, k, v, ...)  =>  FlashAttention(q, k, v, ...)`, which keeps no scores for its
gradient.

An added mask that depends on parameters, such as T5's relative positions (arXiv 1910.10683),
becomes a bias, which has a gradient; the other addends stay the mask: `(bias + mask)  =>  bias,
mask`.
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, attributes, type_of
from onward.graph.ops.attention import as_bias
from onward.graph.types import DType
from onward.rewrite.context import Context


def flash_attention(graph: Graph, context: Context) -> int:
    """Turns each Attention into FlashAttention where kernels accept it."""
    edits = 0
    trained = _reached_from_parameters(graph)
    for node in list(graph):
        if node.op_type == "Softmax" and (why := node.meta.get("unfused")):
            context.missed(node, "FlashAttention", why)
        if node.op_type != "Attention":
            continue
        q, k, v, mask, *rest, bias = [*node.inputs, *[None] * 6][:9]
        leading = [type_of(x).shape[:-2] for x in (q, k, v)]
        if leading[1] != leading[2] or leading[0][:-1] != leading[1][:-1]:
            context.missed(node, "FlashAttention", "sequences share keys")
            continue
        b, attrs = Builder.at(graph, node), attributes(node)
        if bias is None and mask in trained and type_of(mask).dtype != DType.BOOL:
            assert q is not None and k is not None
            mask, bias = _parted(b, mask, trained, q, k)
            trained.add(bias)
        if bias in trained:
            attrs["bias_gradient"] = 1
        inputs = node.inputs if bias is None else [q, k, v, mask, *rest, bias]
        if not context.takes(node, "FlashAttention", inputs, attrs):
            continue
        y, _, _ = b.FlashAttention(*inputs, **attrs)
        graph.replace(node.outputs[0], y)
        graph.remove([node])
        edits += 1
    return edits


def _parted(
    b: Builder, mask: Value, trained: set[Value], q: Value, k: Value
) -> tuple[Value | None, Value]:
    """Splits an added mask f[...,Q,S] into the sum of addends without trained parameters, None if
    there are none, and a bias f[1 or B,H,Q,S], the sum of the others."""
    addends = _addends(mask, trained)
    fixed = [x for x in addends if x not in trained]
    if any(type_of(x).rank > 4 for x in addends):
        addends, fixed = [mask], []
    bias = _sum(b, [x for x in addends if x not in fixed])
    return (_sum(b, fixed) if fixed else None), as_bias(b, bias, q, k)


def _addends(value: Value, trained: set[Value]) -> list[Value]:
    """The addends of a value, found through sums that depend on parameters."""
    node = value.producer()
    if node is None or node.op_type != "Add" or value not in trained:
        return [value]
    return [x for part in node.inputs if part is not None for x in _addends(part, trained)]


def _sum(b: Builder, values: Sequence[Value]) -> Value:
    total, *rest = values
    for x in rest:
        total = b.Add(total, x)
    return total


def _reached_from_parameters(graph: Graph) -> set[Value]:
    """The floating values through which a parameter may get a gradient."""
    reached = set(graph.inputs_with(Role.PARAM))
    for node in graph:
        if any(x in reached for x in node.inputs) and node.op_type != "StopGradient":
            reached.update(y for y in node.outputs if type_of(y).is_floating)
    return reached
