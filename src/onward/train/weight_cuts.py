"""WeightCuts: which part of each weight the ranks of a Trainer hold, chosen once and kept with its
run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.distribute.tensor import AXIS, Sharding, TensorCut
from onward.options import TrainerOptions
from onward.train.held_optimizer import HeldOptimizer, paths_of
from onward.train.parameter_parts import alone_in_memory, parts_of
from onward.train.ranks import Ranks
from onward.train.state_part import State, StatePart
from onward.train.torch_optimizer import TorchOptimizer

KEY = "tensor_cuts"  # in a Trainer's state_dict, where there are any
Choice = dict[str, tuple[int, int]]  # by path, the dim of a parameter and its groups


class WeightCuts:
    """The cuts of a model's weights over the ranks of a Trainer, and the parts that this one holds.

    With ZeRO stage 3 every large weight is cut, as a row. Along `tp` the cuts are those that make
    the step fastest; they are chosen for the first batch, or come with the state of a run.
    """

    def __init__(self, model: torch.nn.Module, ranks: Ranks, options: TrainerOptions) -> None:
        self._model, self._ranks = model, ranks
        self._is_tensor = ranks.mesh.size(AXIS) > 1
        self.are_asked_for = options.zero == 3 or self._is_tensor
        self.parts = parts_of(model, ranks.mesh, self.are_asked_for)

    def make(self, held: HeldOptimizer[Any], choose: Callable[[], Choice]) -> None:
        """Has this rank hold its parts alone, where the options ask for it. choose: makes the
        choice for the batch at hand, with whole weights."""
        if not self.are_asked_for or not isinstance(held, TorchOptimizer):
            return
        shards = held.updates.state.shards
        if self._is_tensor and shards.tensor_cuts is None:
            cuts = self.parts.cut_along_dims()
            if not self.parts.is_cut:
                alone = alone_in_memory(self._model)
                cuts = self._of(self._ranks.cuts_of_first(choose()))
                cuts = {p: cut for p, cut in cuts.items() if p in alone}
            held.cut_tensors(cuts)
        self.parts.cut(self._model, shards.of_weights)

    def part(self, held: HeldOptimizer[Any]) -> StatePart:
        """The entry of the choice in a state, by which another run makes the same."""

        def save() -> dict[str, Any]:
            if not isinstance(held, TorchOptimizer):
                return {}
            cuts = held.updates.state.shards.tensor_cuts or {}
            paths = paths_of(self._model)
            found = {paths[p]: [c.sharding.dim, c.sharding.groups] for p, c in cuts.items()}
            return {KEY: {"ranks": self._ranks.mesh.size(AXIS), "cuts": found}} if found else {}

        return StatePart(save, lambda state: None, lambda state: lambda: None)

    def take(self, state: Any, held: HeldOptimizer[Any]) -> None:
        """Makes the choice that a state has, before the state is restored, where there is none yet
        and as many ranks made it."""
        if not self._is_tensor or not isinstance(held, TorchOptimizer):
            return
        chosen = held.updates.state.shards.tensor_cuts is not None
        if chosen or not isinstance(state, Mapping):
            return
        found: State = state.get(KEY) or {}
        if found.get("ranks") == self._ranks.mesh.size(AXIS):
            choice = {name: (dim, groups) for name, (dim, groups) in found["cuts"].items()}
            held.cut_tensors(self._of(choice))

    def _of(self, choice: Choice) -> dict[torch.Tensor, TensorCut]:
        parameters, mesh = dict(self._model.named_parameters()), self._ranks.mesh
        size, place = mesh.size(AXIS), mesh.coordinate(AXIS)
        return {
            parameters[name]: TensorCut(AXIS, size, place, Sharding(*cut))
            for name, cut in choice.items()
            if name in parameters
        }


__all__ = ["KEY", "WeightCuts"]
