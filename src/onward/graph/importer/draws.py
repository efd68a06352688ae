"""Draws: the dropouts of a model that is read, each a site with a number of its own."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.random_sites import dropout
from onward.graph.types import Size


class Draws:
    """Makes the dropouts of a graph, and at the first one its random inputs.

    A mask is a function of an element's place, its sample's number among it, so that samples are
    told from other dims: they are the first dim of the model's first input that has dims.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.sites = graph, 0

    def dropped(self, b: Builder, x: Value, ratio: float) -> Value:
        """x after dropout with probability `ratio`, at the next site."""
        site, self.sites = self.sites, self.sites + 1
        return dropout(b, x, ratio, site, self._batch())

    def _batch(self) -> Size | None:
        shapes = (type_of(x).shape for x in self.graph.inputs_with(Role.BATCH))
        return next((shape[0] for shape in shapes if shape), None)


__all__ = ["Draws"]
