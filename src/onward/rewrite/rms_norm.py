"""`x * Reciprocal(Sqrt(mean(x^2) + epsilon)) * scale  =>  RMSNorm(x, scale)`.

Models write it in many ways: the square as `x x` or a power, the root inverted or divided by, the
factors in any order, the scale a parameter or computed from one (`1 + weight`).
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.rewrite.context import Context
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.matching import made_by, number_of, over_the_last, squared


def rms_norm(graph: Graph, context: Context) -> int:
    edits = 0
    for node in list(graph):
        if node.op_type not in ("Mul", "Div"):
            continue
        found = _normalised(node)
        if found is None:
            continue
        x, epsilon = found
        for last in list(node.outputs[0].consumers()):
            scale = _scale(last, node.outputs[0])
            if scale is None:
                context.missed(
                    node, "RMSNorm", ("no product with a weight of one number per feature follows")
                )
                continue
            if not context.takes(last, "RMSNorm", [x, scale], {"epsilon": epsilon}):
                continue
            y = Builder.at(graph, last).RMSNorm(x, scale, epsilon=epsilon)
            graph.replace(last.outputs[0], y)
            edits += 1
    if edits:
        # remove the old nodes now, since they count as readers of what other norms share
        dead_code_elimination(graph)
    return edits


def _normalised(node: Node) -> tuple[Value, float] | None:
    """The pair (x, epsilon) if the node computes `x / sqrt(mean(x^2) + epsilon)`, else None."""
    first, second = node.inputs
    turns = [(first, second)] if node.op_type == "Div" else [(first, second), (second, first)]
    for x, factor in turns:
        root = made_by(factor, "Sqrt" if node.op_type == "Div" else "Reciprocal")
        if root is not None and root.op_type == "Reciprocal":
            root = made_by(root.inputs[0], "Sqrt")
        total = made_by(root.inputs[0], "Add") if root is not None else None
        if x is None or root is None or total is None:
            continue
        for mean_of, epsilon in (total.inputs, total.inputs[::-1]):
            mean, number = made_by(mean_of, "ReduceMean"), number_of(epsilon)
            if mean is None or number is None or not attributes(mean).get("keepdims", 1):
                continue
            if over_the_last(mean) and squared(mean.inputs[0]) is x:
                return x, number
    return None


def _scale(node: Node, y: Value) -> Value | None:
    """The other factor of a product with y, if it is one number for each feature."""
    if node.op_type != "Mul":
        return None
    type = type_of(y)
    for factor, scale in (node.inputs, node.inputs[::-1]):
        if factor is y and scale is not None and type_of(scale) == type.with_shape(type.shape[-1:]):
            return scale
    return None
