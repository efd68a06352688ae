"""Graphs: the forward, packed and step graphs of one captured call, each made when first asked
for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from onward.capture import Captured
from onward.compile import Compiler
from onward.differentiate import Recipe, settled
from onward.graph.graph import Graph
from onward.shards import Shard


class Graphs:
    """The graphs of a captured call: of a training step if there is a recipe, else of an
    evaluation. held, cuts: by parameter, the part of it that this rank has, for an evaluation
    (`Compiler.evaluated`)."""

    def __init__(
        self,
        compiler: Compiler,
        captured: Captured,
        recipe: Recipe | None = None,
        held: Mapping[str, Shard] | None = None,
        cuts: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.compiler, self.captured, self.recipe = compiler, captured, recipe
        self._held, self._cuts = held or {}, cuts or {}
        self._packed: dict[tuple[str, ...], Graph | None] = {}

    @cached_property
    def forward(self) -> Graph:
        """The forward on every row."""
        return self.compiler.forward(self.captured)

    def packed(self, outputs: Sequence[str]) -> Graph | None:
        """The forward on the rows that these outputs read; None where that is every row."""
        key = tuple(outputs)
        if key not in self._packed:
            packed = self.compiler.pack(self.forward, key)
            self._packed[key] = None if packed is None else packed.graph
        return self._packed[key]

    @cached_property
    def step(self) -> Graph:
        """The graph that a batch runs on every row: forward, and gradients and updates as the
        recipe says."""
        return self.completed(self.forward)

    def completed(self, forward: Graph) -> Graph:
        """Adds gradients and updates to a forward graph, as the recipe says; to that of an
        evaluation, what ranks with parts of parameters exchange."""
        recipe = self._settled
        if recipe is not None:
            return self.compiler.step(forward, recipe)
        if self._held or self._cuts:
            return self.compiler.evaluated(forward, self._held, self._cuts)
        return forward

    @cached_property
    def _settled(self) -> Recipe | None:
        """The recipe with what depends on the forward decided, for all of its forms alike."""
        if self.recipe is None:
            return None
        return settled(self.compiler.joint(self.recipe), self.forward)
