"""WeightCuts: which part of each weight the ranks of a Trainer hold, chosen once and kept with its
run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from onward.distribute import pipeline
from onward.distribute.tensor import AXIS, Sharding, TensorCut
from onward.errors import OnwardError
from onward.options import TrainerOptions
from onward.shards import StageCut
from onward.train.cut_tensors import ChosenCut, chosen_of, nested, outer_of, stage_of
from onward.train.held_optimizer import HeldOptimizer, paths_of
from onward.train.parameter_parts import alone_in_memory, parts_of
from onward.train.ranks import Ranks
from onward.train.state_part import State, StatePart
from onward.train.torch_optimizer import TorchOptimizer

TENSORS, STAGES = "tensor_cuts", "stages"  # in a Trainer's state_dict, where there are any
# by path: the dim of a parameter and its groups; or the stages that read it
Choice = dict[str, tuple[int, ...]]
Choices = dict[str, Choice]  # by entry of the state


class WeightCuts:
    """The cuts of a model's weights over the ranks of a Trainer, and the parts that this one holds.

    With ZeRO stage 3 every large weight is cut, as a row. Along `tp` the cuts are those that make
    the step fastest, and along `pp` the stages those of about equal time; they are chosen for the
    first batch, or come with the state of a run.
    """

    def __init__(self, model: torch.nn.Module, ranks: Ranks, options: TrainerOptions) -> None:
        self._model, self._ranks = model, ranks
        self.are_stages = ranks.mesh.size(pipeline.AXIS) > 1
        axes = {STAGES: pipeline.AXIS, TENSORS: AXIS}
        self._axes = {key: axis for key, axis in axes.items() if ranks.mesh.size(axis) > 1}
        self.are_asked_for = options.zero == 3 or bool(self._axes)
        self.parts = parts_of(model, ranks.mesh, self.are_asked_for)

    def make(self, held: HeldOptimizer[Any], choose: Callable[[Collection[str]], Choices]) -> None:
        """Has this rank hold its parts alone, where the options ask for it. choose: makes choices,
        by entry of the state, for the batch at hand, with whole weights. Raises OnwardError for
        weights that cannot be shared so."""
        if not self.are_asked_for:
            return
        if not isinstance(held, TorchOptimizer):
            if self.are_stages:
                raise pipeline.own_steps(str(held.why))
            return
        shards = held.updates.state.shards
        if self._axes and shards.tensor_cuts is None:
            cuts = self.parts.chosen()
            if len(self._axes) > 1 and not held.updates.state.record.elementwise:
                raise pipeline.whole_updates(held.updates.state.record.said)
            if not self.parts.is_cut:
                alone = alone_in_memory(self._model)
                made = choose(self._axes).items()
                cuts = self._of({key: self._ranks.cuts_of_first(cut) for key, cut in made})
                if self.are_stages:
                    self._require_stages(cuts, alone)
                cuts = {p: cut for p, cut in cuts.items() if p in alone}
            held.cut_tensors(cuts)
        self.parts.cut(self._model, shards.of_weights)

    def require_no_results(self, names: tuple[str, ...]) -> None:
        """Raises OnwardError where results are asked for that one stage alone has."""
        if self.are_stages and names:
            raise OnwardError(
                f"fetch={names} asks for outputs of the model, which the rank of the last stage "
                "along pp alone has; fix: leave fetch out, the loss is on every rank"
            )

    def require_one_graph(self) -> None:
        """Raises OnwardError where a step is to be explained of which a rank has one stage."""
        if self.are_stages:
            raise OnwardError(
                "explain shows the step of one process, and each rank along pp has the layers of "
                "its stages; fix: print(trainer.plan), or a Trainer without mesh"
            )

    def part(self, held: HeldOptimizer[Any]) -> StatePart:
        """The entry of the choice in a state, by which another run makes the same."""

        def save() -> dict[str, Any]:
            if not isinstance(held, TorchOptimizer):
                return {}
            cuts = held.updates.state.shards.tensor_cuts or {}
            paths = paths_of(self._model)
            made: dict[str, Any] = {}
            for key in self._axes:
                numbers = {paths[p]: _numbers(key, cut) for p, cut in cuts.items()}
                found = {path: list(each) for path, each in numbers.items() if each is not None}
                if found:
                    made[key] = {"ranks": self._size(key), "cuts": found}
            return made

        return StatePart(save, lambda state: None, lambda state: lambda: None)

    def take(self, state: Any, held: HeldOptimizer[Any]) -> None:
        """Makes the choice that a state has, before the state is restored, where there is none yet
        and as many ranks made it."""
        if not self._axes or not isinstance(held, TorchOptimizer):
            return
        chosen = held.updates.state.shards.tensor_cuts is not None
        if chosen or not isinstance(state, Mapping):
            return
        said: dict[str, State] = {key: state.get(key) or {} for key in self._axes}
        if all(found.get("ranks") == self._size(key) for key, found in said.items()):
            held.cut_tensors(
                self._of(
                    {
                        key: {name: tuple(numbers) for name, numbers in found["cuts"].items()}
                        for key, found in said.items()
                    }
                )
            )

    def _size(self, key: str) -> int:
        return self._ranks.mesh.size(self._axes[key])

    def _of(self, choices: Choices) -> dict[torch.Tensor, ChosenCut]:
        """The parts by all choices, of which a part of the stages' is the inner one."""
        found: dict[torch.Tensor, ChosenCut] = {}
        for p, name in paths_of(self._model).items():
            cuts = {key: choices[key].get(name) for key in self._axes}
            made = chosen_of(nested(*(self._cut(k, n) for k, n in cuts.items() if n is not None)))
            if made is not None:
                found[p] = made
        return found

    def _cut(self, key: str, numbers: tuple[int, ...]) -> ChosenCut:
        size, place = self._size(key), self._ranks.mesh.coordinate(self._axes[key])
        if key == STAGES:
            return StageCut(self._axes[key], size, place, numbers)
        return TensorCut(self._axes[key], size, place, Sharding(numbers[0], numbers[1]))

    def _require_stages(
        self, cuts: Mapping[torch.Tensor, ChosenCut], alone: set[torch.Tensor]
    ) -> None:
        """Raises OnwardError for weights that share memory, of which a rank cannot let go."""
        paths = paths_of(self._model)
        shared = next((paths[p] for p in cuts if p not in alone), None)
        if shared is not None:
            raise pipeline.shared_memory(shared)


def _numbers(key: str, cut: ChosenCut) -> tuple[int, ...] | None:
    """A cut as an entry of a state keeps it; None where it has none of that kind."""
    stage, outer = stage_of(cut), outer_of(cut)
    if key == STAGES:
        return None if stage is None else stage.stages
    if outer is None:
        return None
    assert outer.sharding.dim is not None, "a cut is along a dim"
    return outer.sharding.dim, outer.sharding.pieces


__all__ = ["STAGES", "TENSORS", "WeightCuts"]
