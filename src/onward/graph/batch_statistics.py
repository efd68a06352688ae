"""Batch normalization in training form written out, in files for other engines.

onnxruntime writes the next running statistics into the memory of the ones that it is given. Where
these are constants, and equal constants are one, every such layer of as many channels writes there,
and what the layers return of a batch is that of the last one.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.graph.ops.batch_norm import EPSILON, MOMENTUM, channels, other_dims, run_on


def write_out_batch_statistics(graph: Graph) -> None:
    """Replaces each BatchNormalization in training form by the ops that it is made of."""
    for node in list(graph):
        if node.op_type == "BatchNormalization" and attributes(node).get("training_mode", 0):
            for old, new in zip(node.outputs, _written_out(graph, node), strict=True):
                graph.replace(old, new)
            graph.remove([node])


def _written_out(graph: Graph, node: Node) -> list[Value]:
    """The values of a node's outputs: y f[N,C,*S], and the next mean and variance f[C]."""
    b, held = Builder.at(graph, node), attributes(node)
    x, scale, bias, *running = (v for v in node.inputs if v is not None)
    dtype = type_of(running[0]).dtype
    wide, dims = b.cast(x, dtype), b.ints(other_dims(x))
    mean = b.ReduceMean(wide, dims, keepdims=0)
    apart = b.Sub(wide, channels(b, x, mean))
    variance = b.ReduceMean(b.Mul(apart, apart), dims, keepdims=0)
    inverse = b.Reciprocal(b.Sqrt(b.Add(variance, float(held.get("epsilon", EPSILON)))))
    slope = channels(b, x, b.Mul(inverse, b.cast(scale, dtype)))
    y = b.Add(b.Mul(apart, slope), channels(b, x, b.cast(bias, dtype)))
    share = float(held.get("momentum", MOMENTUM))
    if share:
        mean, variance = (
            run_on(b, before, now, share, 1.0 - share)
            for before, now in zip(running, (mean, variance), strict=True)
        )
    return [b.cast(y, type_of(x).dtype), mean, variance]


__all__ = ["write_out_batch_statistics"]
