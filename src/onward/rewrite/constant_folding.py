"""`f(constants)  =>  constant`; shape vectors with known numbers become literals."""

from __future__ import annotations

import numpy as np

from onward.graph.evaluate import evaluate_constant
from onward.graph.graph import ONWARD, Graph, Node, array_of, content_of, type_of
from onward.graph.types import DType, product

LIMIT = 1 << 16  # elements; larger results are cheaper to recompute than to store


def constant_folding(graph: Graph) -> int:
    """Evaluates nodes with only constant inputs, with the reference evaluator."""
    edits = 0
    for node in list(graph):
        if node.domain == ONWARD:
            continue
        array = _known(node)
        if array is not None:
            graph.replace(node.outputs[0], graph.constant(array))
        elif _all_constant(node):
            for value, result in zip(node.outputs, evaluate_constant(node), strict=True):
                graph.replace(value, graph.constant(np.asarray(result)))
        else:
            continue
        graph.remove([node])
        edits += 1
    return edits


def _known(node: Node) -> np.ndarray | None:
    """The literal result of an integer node that shape inference has determined; None otherwise."""
    value = node.outputs[0]
    type, content = type_of(value), content_of(value)
    if len(node.outputs) != 1 or content is None or type.dtype != DType.INT64:
        return None
    if not all(isinstance(n, int) for n in content) or product(type.shape) != len(content):
        return None
    return np.array(content, dtype=np.int64).reshape([len(content)] * type.rank)


def _all_constant(node: Node) -> bool:
    if not node.inputs or not all(v is None or array_of(v) is not None for v in node.inputs):
        return False
    sizes = [product(type_of(v).shape) for v in node.outputs]
    return all(isinstance(n, int) and n <= LIMIT for n in sizes)
