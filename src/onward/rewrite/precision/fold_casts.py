"""Folds casts into ops that read or write the other type themselves. The result has the same bits,
one pass over memory less, and a weight's gradient is stored once, not in two types.

    AddLayerNormalization(Cast(x), ...)        =>  AddLayerNormalization(x, ...)
    AddLayerNormalizationGrad(Cast(dy), ...)   =>  AddLayerNormalizationGrad(dy, ...)
    Cast(AddLayerNormalization(...).y)         =>  AddLayerNormalization(..., y_type).y
    AdamUpdate(parameter, Cast(gradient), ...) =>  AdamUpdate(parameter, gradient, ...)
    AllFinite(norm, Cast(gradient), ...)       =>  AllFinite(norm, gradient, ...)

The norm of a gradient reads the cast value, which is kept only for that.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.types import DType
from onward.rewrite.context import Context
from onward.rewrite.matching import casts_of, widened

_NORMS = ("AddLayerNormalization", "AddRMSNorm")
_GRADIENTS = tuple(f"{op}Grad" for op in _NORMS)
_BESIDE = "ReduceL2"  # the norm, for clipping


def fold_casts(graph: Graph, context: Context) -> int:
    edits, outputs = 0, graph.output_values()
    for node in list(graph):
        if node.op_type in _NORMS:
            edits += _into_reader(node, 0, context)
            edits += _into_writer(graph, node, outputs, context)
        elif node.op_type in _GRADIENTS:
            edits += _into_reader(node, 0, context)
        elif node.op_type == "Cast" and node.outputs[0] not in outputs:
            edits += _of_a_gradient(node, context)
    return edits


def _into_reader(node: Node, i: int, context: Context) -> int:
    """Gives a reader the low operand instead of its cast to f32, where kernels accept that."""
    source = widened(node.inputs[i])
    if source is None:
        return 0
    inputs = [source if j == i else v for j, v in enumerate(node.inputs)]
    if not context.takes(node, node.op_type, inputs, attributes(node)):
        return 0
    node.replace_input_with(i, source)
    return 1


def _into_writer(graph: Graph, node: Node, outputs: set[Value], context: Context) -> int:
    """Makes a norm write y in the low type that all readers cast it to."""
    y = node.outputs[0]
    casts = casts_of(y, outputs)
    lows = {type_of(cast.outputs[0]).dtype for cast in casts}
    if len(lows) != 1:
        return 0
    if not type_of(casts[0].outputs[0]).is_low or type_of(y).dtype != DType.FLOAT:
        return 0
    attrs = attributes(node) | {"y_type": int(next(iter(lows)))}
    if not context.takes(node, node.op_type, node.inputs, attrs):
        return 0
    made = Builder.at(graph, node).node(node.op_type, list(node.inputs), attrs)
    assert isinstance(made, tuple)
    for old, new in zip(node.outputs, made, strict=True):
        if old is not y:
            graph.replace(old, new)
    for cast in casts:
        graph.replace(cast.outputs[0], made[0])
    graph.remove([*casts, node])
    return 1


def _reads_gradients(node: Node) -> bool:
    """Whether a node is an update, or the finiteness test."""
    updates = (op for record in OPTIMIZERS.values() for op in record.updates)
    return node.op_type == "AllFinite" or any(node.op_type == op.name for op in updates)


def _of_a_gradient(cast: Node, context: Context) -> int:
    """Removes the cast of a gradient to f32 that only updates, its norm and the finiteness test
    read."""
    source, readers = widened(cast.outputs[0]), list(cast.outputs[0].uses())
    uses = [u for u in readers if u.node.op_type != _BESIDE]
    if source is None or not uses or not all(_reads_gradients(u.node) for u in uses):
        return 0
    for use in uses:
        node, i = use.node, use.idx
        inputs = [source if j == i else v for j, v in enumerate(node.inputs)]
        if not context.takes(node, node.op_type, inputs, attributes(node), gradient=False):
            return 0
    for use in uses:
        use.node.replace_input_with(use.idx, source)
    return 1


__all__ = ["fold_casts"]
