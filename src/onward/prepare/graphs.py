"""Graphs: the forward, packed and step graphs of one captured call, each made when first asked
for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from onward.capture import Captured
from onward.compile import Compiler
from onward.differentiate import Recipe, settled
from onward.distribute.pipeline import batch_names, micro_symbols, rows_of
from onward.errors import OnwardError
from onward.graph.graph import Graph
from onward.shards import PipelineCut, Shard


class Graphs:
    """The graphs of a captured call: of a training step if there is a recipe, else of an
    evaluation. held, cuts: by parameter, the part of it that this rank has, for an evaluation
    (`Compiler.evaluated`). stages: how ranks share the layers, and how many micro-batches a batch
    makes."""

    def __init__(
        self,
        compiler: Compiler,
        captured: Captured,
        recipe: Recipe | None = None,
        held: Mapping[str, Shard] | None = None,
        cuts: Mapping[str, tuple[int, int]] | None = None,
        stages: PipelineCut | None = None,
    ) -> None:
        self.compiler, self.captured, self.recipe = compiler, captured, recipe
        self._held, self._cuts, self._stages = held or {}, cuts or {}, stages
        self._packed: dict[tuple[str, ...], Graph | None] = {}

    @cached_property
    def forward(self) -> Graph:
        """The forward on every row."""
        return self.compiler.forward(self.captured)

    def packed(self, outputs: Sequence[str]) -> Graph | None:
        """The forward on the rows that these outputs read; None where that is every row, and where
        ranks share the layers or the positions, so that each would read other rows."""
        recipe = self.recipe
        if self._stages is not None or (recipe is not None and recipe.splits_positions):
            return None
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
        if self._held or self._cuts or self._stages is not None:
            return self.compiler.evaluated(forward, self._held, self._cuts, self._stages)
        return forward

    def in_micro_batches(
        self, staged: Mapping[str, torch.Tensor], dims: Mapping[str, int]
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """The tensors of a batch by graph input, and its sizes by symbol, in micro-batches where
        ranks share the layers. Raises OnwardError for fewer rows than micro-batches."""
        number = 1 if self._stages is None else self._stages.micro_batches
        if number == 1:
            return dict(staged), dict(dims)
        names = batch_names(self.forward, number)
        rows = rows_of(self.forward)
        least, more = divmod(dims[rows], number)
        if not least:
            raise OnwardError(
                f"a batch of {dims[rows]} rows has no {number} micro-batches "
                "(pipeline_microbatches); fix: a row for each of them"
            )
        sizes = [least + (m < more) for m in range(number)]
        found: dict[str, torch.Tensor] = {}
        for name, tensor in staged.items():
            own = names.get(name)
            found |= (
                {name: tensor} if own is None else dict(zip(own, tensor.split(sizes), strict=True))
            )
        return found, {**dims, **dict(zip(micro_symbols(rows, number), sizes, strict=True))}

    @cached_property
    def _settled(self) -> Recipe | None:
        """The recipe with what depends on the forward decided, for all of its forms alike."""
        if self.recipe is None:
            return None
        joint = self.compiler.joint(self.recipe)
        return settled(joint, self.forward, self.compiler.splits_samples(self.recipe))
