"""`Add(Gemm(a, b), c)  =>  Gemm(a, b, c)`: residuals and gradients are added inside the product.

A BLAS can add to its output (beta = 1), and the plan puts the output over `c` if `c` is not read
again, as with an accumulator, or the gradient that arrives on a residual branch.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of, where


def gemm_add(graph: Graph) -> int:
    edits = 0
    outputs = graph.output_values()
    place = {node: i for i, node in enumerate(graph)}
    for node in list(graph):
        if node.op_type != "Add":
            continue
        # if both sides are products, the later one gets the other as its addend
        for side in sorted((0, 1), key=lambda i: -_position(node.inputs[i], place)):
            product, addend = node.inputs[side], node.inputs[1 - side]
            assert product is not None and addend is not None
            gemm = _gemm(product, outputs)
            if gemm is None or type_of(addend) != type_of(node.outputs[0]):
                continue
            if type_of(product) != type_of(addend):
                continue
            b = Builder.at(graph, node)
            b.module = where(gemm)
            shape = type_of(gemm.outputs[0]).shape
            c = b.reshape(addend, shape)
            y = b.one("Gemm", [*gemm.inputs[:2], c], attributes(gemm))
            new = b.reshape(y, type_of(addend).shape)
            for value in (c, y, new):
                maker = value.producer()
                if maker is not None:
                    place.setdefault(maker, place[node])
            graph.replace(node.outputs[0], new)
            _remove(graph, node, product, gemm)
            edits += 1
            break
    return edits


def _position(value: Value | None, place: dict[Node, int]) -> int:
    maker = value.producer() if value is not None else None
    return -1 if maker is None else place[maker]


def _gemm(value: Value, outputs: set[Value]) -> Node | None:
    """The Gemm without addend that computes the value, directly or reshaped, if nothing else reads
    it."""
    while True:
        node = value.producer()
        if node is None or value in outputs or len(value.uses()) != 1:
            return None
        if node.op_type != "Reshape" or node.inputs[0] is None:
            break
        value = node.inputs[0]
    if node.op_type != "Gemm":
        return None
    attrs = attributes(node)
    scaled = attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0
    has_addend = len(node.inputs) > 2 and node.inputs[2] is not None
    return None if scaled or has_addend else node


def _remove(graph: Graph, add: Node, product: Value, gemm: Node) -> None:
    """Removes the Add, the reshapes between, and the old product."""
    chain = [add]
    node = product.producer()
    while node is not None and node is not gemm:
        chain.append(node)
        source = node.inputs[0]
        node = source.producer() if source is not None else None
    graph.remove([*chain, gemm])
