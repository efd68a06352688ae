"""How much arithmetic a forward graph is, as a function of its sizes."""

from __future__ import annotations

from collections.abc import Mapping

from onward.graph.graph import Graph, Node, type_of
from onward.graph.types import Dim, Size, product


class Work:
    """Multiply-adds (twice: FLOPs) of a graph's products and attentions."""

    def __init__(self, graph: Graph) -> None:
        self._plain: Size = 0
        self._shared: list[tuple[Size, Size]] = []  # a number of FLOPs, divided by a size
        for node in graph:
            self._add(node)

    def _add(self, node: Node) -> None:
        flops = node_flops(node)
        per = node.meta.get("sequences")
        if per is None:
            self._plain = self._plain + flops
        else:
            self._shared.append((flops, per))

    def flops(self, dims: Mapping[str, int]) -> float:
        """At these sizes. Attention of packed rows is taken to have sequences of one length."""
        total = float(number(self._plain, dims))
        return total + sum(number(n, dims) / number(d, dims) for n, d in self._shared)


def node_flops(node: Node) -> Size:
    """FLOPs of one node's products; 0 for everything else. Packed attention: as if one sequence."""
    match node.op_type:
        case "Gemm" | "MatMul":
            return product(type_of(node.inputs[0]).shape) * type_of(node.outputs[0]).shape[-1] * 2
        case "Attention" | "FlashAttention":
            q, k, v = (type_of(node.inputs[i]).shape for i in range(3))
            return product(q[:-1]) * k[-2] * (q[-1] + v[-1]) * 2
        case "LinearCrossEntropy":
            return product(type_of(node.inputs[0]).shape) * type_of(node.inputs[1]).shape[0] * 2
        case _:
            return 0


def number(size: Size, dims: Mapping[str, int]) -> int:
    """The size as a number."""
    return size.number(dims) if isinstance(size, Dim) else size
