"""`activation(Gemm(x, w, bias))  =>  BiasActivation(Gemm(x, w), bias)`.

The sum is never written to memory, and the op's gradient includes the bias's. Activations: both
forms of Gelu, Relu, and Silu, which is written `u * Sigmoid(u)`.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of
from onward.rewrite.context import Context


def bias_activation(graph: Graph, context: Context) -> int:
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        found = activation_of(node, outputs)
        if found is None:
            continue
        name, u, readers = found
        gemm = _product_before(u)
        if gemm is None:
            continue
        reason = _obstacle(u, readers, gemm, outputs)
        if reason is not None:
            context.missed(node, "BiasActivation", reason)
            continue
        call = [gemm.outputs[0], gemm.inputs[2]]
        if not context.takes(node, "BiasActivation", call, {"activation": name}):
            continue
        attrs = {k: v for k, v in attributes(gemm).items() if k != "beta"}
        product = Builder.at(graph, gemm).Gemm(*gemm.inputs[:2], **attrs)
        b = Builder.at(graph, node, before=gemm)
        y = b.BiasActivation(product, gemm.inputs[2], activation=name)
        sum_ = gemm.outputs[0]
        graph.replace(sum_, y)  # reshapes between the two now pass y on
        graph.replace(node.outputs[0], y if u is sum_ else u)
        graph.remove([*readers, gemm])
        edits += 1
    return edits


def activation_of(node: Node, outputs: set[Value]) -> tuple[str, Value, list[Node]] | None:
    """Recognizes an activation by its last node. Returns its name, its input, and its nodes, last
    first; None for other nodes."""
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


def _product_before(u: Value) -> Node | None:
    """The Gemm with an addend whose result is u, directly or reshaped; None where there is none."""
    node = u.producer()
    while node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Gemm":
        return None
    return node if len(node.inputs) > 2 and node.inputs[2] is not None else None


def _obstacle(u: Value, readers: list[Node], gemm: Node, outputs: set[Value]) -> str | None:
    """The reason why the product and the activation of u cannot be fused; None where they can.
    readers: of u."""
    bias, y = gemm.inputs[2], type_of(gemm.outputs[0])
    if type_of(bias).shape != y.shape[-1:] or attributes(gemm).get("beta", 1.0) != 1.0:
        return "what is added to the matrix product is not a bias (one number per feature)"
    while True:
        node = u.producer()
        assert node is not None
        if u in outputs or any(user not in readers for user in u.consumers()):
            return "the product with its bias is read by other ops too"
        if node is gemm:
            return None
        assert node.inputs[0] is not None
        u, readers = node.inputs[0], [node]
