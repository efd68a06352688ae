"""FLOPs of a forward graph, as a function of its sizes."""

from __future__ import annotations

from collections.abc import Mapping

from onward.graph.graph import Graph, Node
from onward.graph.ops import flops
from onward.graph.types import Dim, Size


class FlopCount:
    """Counts the FLOPs of a graph's products and attentions: two for each multiplication and
    addition."""

    def __init__(self, graph: Graph) -> None:
        self._plain: Size = 0
        self._shared: list[tuple[Size, Size]] = []  # pairs (FLOPs, divisor)
        for node in graph:
            self._add(node)

    def _add(self, node: Node) -> None:
        done = flops(node)
        per = node.meta.get("sequences")
        if per is None:
            self._plain = self._plain + done
        else:
            self._shared.append((done, per))

    def flops(self, dims: Mapping[str, int]) -> float:
        """The FLOPs at these sizes. Sequences in an attention of packed rows are assumed to be
        equally long."""
        total = float(number(self._plain, dims))
        return total + sum(number(n, dims) / number(d, dims) for n, d in self._shared)


def number(size: Size, dims: Mapping[str, int]) -> int:
    """A size as a number."""
    return size.number(dims) if isinstance(size, Dim) else size
