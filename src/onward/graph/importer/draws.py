"""Draws: the dropouts of a model that is read, each a site with a number of its own."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.ops.random import offset_type, seed_type
from onward.graph.types import Size, divide


class Draws:
    """Makes the dropouts of a graph, and at the first one its random inputs.

    A mask is a function of an element's place, its sample's number among it, so that samples are
    told from other dims: they are the first dim of the model's first input that has dims.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.sites = graph, 0

    def dropped(self, b: Builder, x: Value, ratio: float) -> Value:
        """x after dropout with probability `ratio`, at the next site."""
        seed, offset = self._inputs()
        shape, batch = type_of(x).shape, self._batch()
        site, self.sites = self.sites, self.sites + 1
        found = (i for i, s in enumerate(shape[:-1]) if s == batch and (i == 0 or s != 1))
        sample_dim = next(found, -1)
        if sample_dim < 0 and len(shape) > 1 and batch is not None:  # flattened samples, [B*T, ...]
            rows = divide(shape[0], batch)
            if rows is not None:
                sample_dim = 0
                offset = b.Mul(offset, b.squeeze(b.size(rows), [0]))
        return b.Dropout(x, seed, offset, ratio=ratio, site=site, sample_dim=sample_dim)

    def _batch(self) -> Size | None:
        shapes = (type_of(x).shape for x in self.graph.inputs_with(Role.BATCH))
        return next((shape[0] for shape in shapes if shape), None)

    def _inputs(self) -> tuple[Value, Value]:
        said = self.graph.signature
        if said.seed is None or said.sample_offset is None:
            seed = self.graph.input("seed", seed_type(), Role.RANDOM)
            offset = self.graph.input("sample_offset", offset_type(), Role.RANDOM)
            self.graph.signature = said.but(seed=seed.name, sample_offset=offset.name)
            return seed, offset
        return self.graph.find_input(said.seed), self.graph.find_input(said.sample_offset)


__all__ = ["Draws"]
