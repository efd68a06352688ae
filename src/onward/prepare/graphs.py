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
    evaluation. held: by parameter, the part of it that this rank has, of an evaluation."""

    def __init__(
        self,
        compiler: Compiler,
        captured: Captured,
        recipe: Recipe | None = None,
        held: Mapping[str, Shard] | None = None,
    ) -> None:
        self.compiler, self.captured, self.recipe = compiler, captured, recipe
        self._held = held or {}
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
        evaluation, the gathering of parameters."""
        recipe = self._settled
        if recipe is None:
            return self.compiler.gathered(forward, self._held) if self._held else forward
        return self.compiler.step(forward, recipe)

    @cached_property
    def _settled(self) -> Recipe | None:
        """The recipe with what depends on the forward decided, for all of its forms alike."""
        if self.recipe is None:
            return None
        return settled(self.compiler.joint(self.recipe), self.forward)
