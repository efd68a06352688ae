"""`f(constants)  =>  constant`, and known shape vectors become literals."""

from __future__ import annotations

import numpy as np

from onward.graph.evaluate import evaluate_constant
from onward.graph.graph import ONWARD, Graph, array_of, content_of, type_of
from onward.graph.types import DType, product

LIMIT = 1 << 16  # elements; larger results are cheaper to compute than to keep


def fold(graph: Graph) -> int:
    """Evaluates nodes whose inputs are all constant, on the reference evaluator."""
    edits = 0
    for node in list(graph):
        if node.domain == ONWARD:
            continue
        if len(node.outputs) == 1:
            value = node.outputs[0]
            type, content = type_of(value), content_of(value)
            if content is not None and type.dtype == DType.INT64 and type.is_static:
                if all(isinstance(n, int) for n in content) and product(type.shape) == len(content):
                    array = np.array(content, dtype=np.int64).reshape(type.shape)  # type: ignore[arg-type]
                    graph.replace(value, graph.constant(array))
                    graph.remove([node])
                    edits += 1
                    continue
        if not all(v is None or array_of(v) is not None for v in node.inputs) or not node.inputs:
            continue
        sizes = [product(type_of(v).shape) for v in node.outputs]
        if any(not isinstance(n, int) or n > LIMIT for n in sizes):
            continue
        for value, array in zip(node.outputs, evaluate_constant(node), strict=True):
            graph.replace(value, graph.constant(np.asarray(array)))
        graph.remove([node])
        edits += 1
    return edits
