"""WeightCuts: which part of each weight the ranks of a Trainer hold, chosen once and kept with its
run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.distribute import pipeline
from onward.distribute.tensor import AXIS, Sharding, TensorCut
from onward.errors import OnwardError
from onward.options import TrainerOptions
from onward.shards import StageCut
from onward.train.cut_tensors import ChosenCut
from onward.train.held_optimizer import HeldOptimizer, paths_of
from onward.train.parameter_parts import alone_in_memory, parts_of
from onward.train.ranks import Ranks
from onward.train.state_part import State, StatePart
from onward.train.torch_optimizer import TorchOptimizer

TENSORS, STAGES = "tensor_cuts", "stages"  # in a Trainer's state_dict, where there are any
# by path: the dim of a parameter and its groups; or the stages that read it
Choice = dict[str, tuple[int, ...]]


class WeightCuts:
    """The cuts of a model's weights over the ranks of a Trainer, and the parts that this one holds.

    With ZeRO stage 3 every large weight is cut, as a row. Along `tp` the cuts are those that make
    the step fastest, and along `pp` the stages those of about equal time; they are chosen for the
    first batch, or come with the state of a run.
    """

    def __init__(self, model: torch.nn.Module, ranks: Ranks, options: TrainerOptions) -> None:
        self._model, self._ranks = model, ranks
        self.are_stages = ranks.mesh.size(pipeline.AXIS) > 1
        self._axis = pipeline.AXIS if self.are_stages else AXIS
        self._is_chosen = ranks.mesh.size(self._axis) > 1
        self.are_asked_for = options.zero == 3 or self._is_chosen
        self.parts = parts_of(model, ranks.mesh, self.are_asked_for)

    def make(self, held: HeldOptimizer[Any], choose: Callable[[], Choice]) -> None:
        """Has this rank hold its parts alone, where the options ask for it. choose: makes the
        choice for the batch at hand, with whole weights. Raises OnwardError for weights that cannot
        be shared so."""
        if not self.are_asked_for:
            return
        if not isinstance(held, TorchOptimizer):
            if self.are_stages:
                raise OnwardError(
                    f"{held.why}, and each rank along pp holds the weights of its stages alone; "
                    "fix: an optimizer with an update in the graph"
                )
            return
        shards = held.updates.state.shards
        if self._is_chosen and shards.tensor_cuts is None:
            cuts = self.parts.chosen()
            if not self.parts.is_cut:
                alone = alone_in_memory(self._model)
                cuts = self._of(self._ranks.cuts_of_first(choose()))
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

    def require_full_windows(self) -> None:
        """Raises OnwardError where a window would end early whose sums stages have."""
        if self.are_stages:
            raise OnwardError(
                "update() ends a window early, which ranks along pp cannot do yet; fix: as many "
                "micro-batches as gradient_accumulation_steps, such as by drop_last=True"
            )

    def part(self, held: HeldOptimizer[Any]) -> StatePart:
        """The entry of the choice in a state, by which another run makes the same."""

        def save() -> dict[str, Any]:
            if not isinstance(held, TorchOptimizer):
                return {}
            cuts = held.updates.state.shards.tensor_cuts or {}
            paths = paths_of(self._model)
            found = {paths[p]: list(_numbers(cut)) for p, cut in cuts.items()}
            return {self._key: {"ranks": self._size, "cuts": found}} if found else {}

        return StatePart(save, lambda state: None, lambda state: lambda: None)

    def take(self, state: Any, held: HeldOptimizer[Any]) -> None:
        """Makes the choice that a state has, before the state is restored, where there is none yet
        and as many ranks made it."""
        if not self._is_chosen or not isinstance(held, TorchOptimizer):
            return
        chosen = held.updates.state.shards.tensor_cuts is not None
        if chosen or not isinstance(state, Mapping):
            return
        found: State = state.get(self._key) or {}
        if found.get("ranks") == self._size:
            choice = {name: tuple(numbers) for name, numbers in found["cuts"].items()}
            held.cut_tensors(self._of(choice))

    @property
    def _key(self) -> str:
        return STAGES if self.are_stages else TENSORS

    @property
    def _size(self) -> int:
        return self._ranks.mesh.size(self._axis)

    def _of(self, choice: Choice) -> dict[torch.Tensor, ChosenCut]:
        parameters, mesh = dict(self._model.named_parameters()), self._ranks.mesh
        size, place = self._size, mesh.coordinate(self._axis)
        found: dict[torch.Tensor, ChosenCut] = {}
        for name, numbers in choice.items():
            p = parameters.get(name)
            if p is not None and self.are_stages:
                found[p] = StageCut(self._axis, size, place, numbers)
            elif p is not None:
                found[p] = TensorCut(self._axis, size, place, Sharding(numbers[0], numbers[1]))
        return found

    def _require_stages(
        self, cuts: Mapping[torch.Tensor, ChosenCut], alone: set[torch.Tensor]
    ) -> None:
        """Raises OnwardError for weights that share memory, of which a rank cannot let go."""
        paths = paths_of(self._model)
        shared = next((paths[p] for p in cuts if p not in alone), None)
        if shared is not None:
            raise OnwardError(
                f"{shared} shares its memory with another tensor of the model, and each rank "
                "along pp lets go of the weights of other stages; fix: weights with memory of "
                "their own"
            )


def _numbers(cut: ChosenCut) -> tuple[int, ...]:
    """A cut as it is kept in a state."""
    if isinstance(cut, StageCut):
        return cut.stages
    assert cut.sharding.dim is not None, "a cut is along a dim"
    return cut.sharding.dim, cut.sharding.pieces


__all__ = ["STAGES", "TENSORS", "WeightCuts"]
