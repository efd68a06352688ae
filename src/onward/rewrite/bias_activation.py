"""`activation(Gemm(x, w, bias))  =>  BiasActivation(Gemm(x, w), bias)`.

The sum is never written to memory, and the bias gradient falls out of the activation's. Gelu in
both forms, Relu, and Silu, which is written `u * Sigmoid(u)`.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of, where
from onward.graph.types import DType


def bias_activation(graph: Graph) -> int:
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        found = _activation(node, outputs)
        if found is None:
            continue
        name, u, readers = found
        gemm = _product_before(u, readers, outputs)
        if gemm is None:
            continue
        attrs = {k: v for k, v in attributes(gemm).items() if k != "beta"}
        product = Builder.at(graph, gemm).Gemm(*gemm.inputs[:2], **attrs)
        b = Builder(graph, gemm, where(node), bool(node.meta.get("backward")))
        y = b.BiasActivation(product, gemm.inputs[2], activation=name)
        sum_ = gemm.outputs[0]
        graph.replace(sum_, y)  # reshapes between the two now carry y
        graph.replace(node.outputs[0], y if u is sum_ else u)
        graph.remove([*readers, gemm])
        edits += 1
    return edits


def _activation(node: Node, outputs: set[Value]) -> tuple[str, Value, list[Node]] | None:
    """Its name, what it is applied to, and the nodes it is written in; the last one first."""
    x = node.inputs[0] if node.inputs else None
    if x is None:
        return None
    match node.op_type:
        case "Gelu":
            tanh = attributes(node).get("approximate", "none") == "tanh"
            return "gelu_tanh" if tanh else "gelu", x, [node]
        case "Relu":
            return "relu", x, [node]
        case "Mul":
            for u, gate in (node.inputs, node.inputs[::-1]):
                sigmoid = gate.producer() if gate is not None else None
                if u is None or gate is None or sigmoid is None or gate in outputs:
                    continue
                alone = len(gate.uses()) == 1
                if sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is u and alone:
                    return "silu", u, [node, sigmoid]
            return None
        case _:
            return None


def _product_before(u: Value, readers: list[Node], outputs: set[Value]) -> Node | None:
    """The Gemm with a bias that u is, reshaped or not, where nobody else reads what is between."""
    while True:
        node = u.producer()
        if node is None or u in outputs or any(user not in readers for user in u.consumers()):
            return None
        if node.op_type == "Gemm":
            return node if _has_bias(node) else None
        if node.op_type != "Reshape" or node.inputs[0] is None:
            return None
        u, readers = node.inputs[0], [node]


def _has_bias(gemm: Node) -> bool:
    """One number a column, added as it is; in f32, which the kernels are for."""
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    y = type_of(gemm.outputs[0])
    return (
        bias is not None
        and type_of(bias).shape == y.shape[-1:]
        and y.dtype == DType.FLOAT
        and attributes(gemm).get("beta", 1.0) == 1.0
    )
