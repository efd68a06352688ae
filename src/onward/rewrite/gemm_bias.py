"""`Add(Gemm(a, b), bias)  =>  Gemm(a, b, bias)`: a bias that a model adds by hand, or an exporter.

PyTorch's `linear` is captured with its bias; ONNX files have a MatMul and an Add.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of, where
from onward.graph.types import Size
from onward.graph.types import product as size_of


def gemm_bias(graph: Graph) -> int:
    """Moves each bias `f[N]` into the product before it; returns how many."""
    edits, outputs = 0, graph.output_values()
    for node in list(graph):
        if node.op_type != "Add":
            continue
        for product, bias in (node.inputs, node.inputs[::-1]):
            if product is None or bias is None or not _is_bias(bias, product):
                continue
            columns = size_of(type_of(bias).shape)
            gemm = _alone(product, columns, outputs)
            if gemm is None:
                continue
            b = Builder.at(graph, node)
            b.module = where(gemm)
            bias = b.reshape(bias, (columns,))
            y = b.one("Gemm", [*gemm.inputs[:2], bias], attributes(gemm))
            graph.replace(node.outputs[0], b.reshape(y, type_of(product).shape))
            graph.remove(_chain(node, product, gemm))
            edits += 1
            break
    return edits


def _is_bias(bias: Value, product: Value) -> bool:
    """Whether a value is one number for each of a product's last dims, which may be two: heads and
    features."""
    have, of = type_of(bias), type_of(product)
    return 0 < have.rank < of.rank and have.shape == of.shape[-have.rank :] and have.is_floating


def _alone(value: Value, columns: Size, outputs: set[Value]) -> Node | None:
    """The Gemm of so many columns and without an addend that computes a value, directly or
    reshaped, where nothing else reads it."""
    while True:
        node = value.producer()
        if node is None or value in outputs or len(value.uses()) != 1:
            return None
        if node.op_type == "Gemm":
            break
        if node.op_type != "Reshape" or node.inputs[0] is None:
            return None
        value = node.inputs[0]
    attrs = attributes(node)
    plain = attrs.get("alpha", 1.0) == 1.0 == attrs.get("beta", 1.0)
    has_addend = len(node.inputs) > 2 and node.inputs[2] is not None
    same = type_of(node.outputs[0]).shape[-1] == columns
    return node if plain and same and not has_addend else None


def _chain(add: Node, product: Value, gemm: Node) -> list[Node]:
    """The nodes from the sum back to the product, which nothing reads any more."""
    found, value = [add], product
    while (node := value.producer()) is not None:
        found.append(node)
        if node is gemm or node.inputs[0] is None:
            break
        value = node.inputs[0]
    return found


__all__ = ["gemm_bias"]
