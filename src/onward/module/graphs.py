"""Graphs of a call: the forward, and its gradients with respect to the leaves that its results
reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onward.graph.graph import Graph
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import OutputRequest


class Halves(Graphs):
    """The graph of forward and gradients, to be run in two halves; it shares the forward with
    others.

    ends: results that cotangents arrive for. wrt: graph inputs to differentiate with respect to.
    """

    def __init__(self, base: Graphs, ends: Sequence[str], wrt: Sequence[str]) -> None:
        super().__init__(base.compiler, base.captured)
        self._base, self._ends, self._wrt = base, tuple(ends), tuple(wrt)

    @property
    def forward(self) -> Graph:  # type: ignore[override]
        return self._base.forward

    def packed(self, outputs: Sequence[str]) -> Graph | None:
        return self._base.packed(outputs)

    def completed(self, forward: Graph) -> Graph:
        names = forward.signature.results
        return self.compiler.halves(forward, tuple(names[end] for end in self._ends), self._wrt)


@dataclass(frozen=True)
class HalvesRequest(OutputRequest):
    """A request for results, the buffers that the forward writes, and the gradients."""

    def outputs(self, graph: Graph) -> list[str]:
        return [*super().outputs(graph), *graph.signature.gradients.values()]


__all__ = ["Halves", "HalvesRequest"]
