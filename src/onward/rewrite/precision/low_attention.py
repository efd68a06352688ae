"""`Cast(FlashAttention(Cast(q), Cast(k), Cast(v), ..., bias))  =>  FlashAttention(q, k, v, ...,
bias)`: attention whose scores get an addend of fp32, such as T5's bias, multiplies in low
precision, where kernels read the addend in fp32.

The policy makes all of such attention fp32, since the addend may be out of the low type's range.
Scores and their softmax are fp32 within a kernel, so that they have the same bits.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, attributes, type_of
from onward.rewrite.context import Context
from onward.rewrite.matching import casts_of, widened


def low_attention(graph: Graph, context: Context) -> int:
    edits, outputs = 0, graph.output_values()
    for node in list(graph):
        if node.op_type != "FlashAttention":
            continue
        operands = [widened(x) for x in node.inputs[:3]]
        dtypes = {None if x is None else type_of(x).dtype for x in operands}
        casts = casts_of(node.outputs[0], outputs)
        if len(dtypes) != 1 or {type_of(cast.outputs[0]).dtype for cast in casts} != dtypes:
            continue
        inputs = [*operands, *node.inputs[3:]]
        if not context.takes(node, node.op_type, inputs, attributes(node)):
            continue
        made = Builder.at(graph, node).node(node.op_type, inputs, attributes(node))
        assert isinstance(made, tuple)
        for cast in casts:
            graph.replace(cast.outputs[0], made[0])
        for old, new in zip(node.outputs[1:], made[1:], strict=True):
            graph.replace(old, new)
        graph.remove([*casts, node])
        edits += 1
    return edits


__all__ = ["low_attention"]
