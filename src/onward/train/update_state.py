"""UpdateState: what an update reads and writes besides the weights, by graph input.

It holds the optimizer's moments, the summed gradients of a window, counts of updates and clocks. It
knows only tensors and signatures of step graphs, neither optimizer nor module: the owner of the
weights says which tensor each graph input is, which are updated, and their names for the user.
Nothing here needs `torch.nn` or `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from onward.execute import StateStore
from onward.graph.ops.optimizers import Optimizer as Record
from onward.graph.signature import Signature
from onward.graph.types import DType
from onward.kernels import torch_dtype
from onward.shards import Shard
from onward.train.clocks import Clocks
from onward.train.cut_tensors import row_of
from onward.train.gradient_sums import GradientSums
from onward.train.optimizer_state import ACCUMULATOR, OptimizerState, ParameterState, StateKey
from onward.train.state_form import StateForms, found_form
from onward.train.state_shards import StateShards


class Joining(NamedTuple):
    """The parameters of a step graph that is about to be registered.

    inputs: all of its parameters, by graph input. held: those that the optimizer holds and that
    require a gradient. moving: those of `held` that the loss depends on, so that an update changes
    them.
    """

    inputs: Mapping[str, torch.Tensor]
    held: Collection[torch.Tensor]
    moving: Collection[torch.Tensor]


class UpdateState(GradientSums):
    """The state of one optimizer's updates: its moments and counts, beside the sums of gradients.

    names, version, done, window, accumulator: see `GradientSums`. shards: the parts of parameters
    whose state this rank has; None: it has all. store: where moments lie, if not beside the
    weights.
    """

    def __init__(
        self,
        record: Record,
        forms: StateForms,
        names: Mapping[torch.Tensor, str],
        accumulator: DType | None = None,
        shards: StateShards | None = None,
        store: StateStore | None = None,
    ) -> None:
        super().__init__(names, accumulator)
        self.record = record
        sums = torch_dtype(accumulator or DType.FLOAT)
        self.state = OptimizerState(record, forms, sums, shards, store)
        self._clocks = Clocks()

    def total(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.state.tensor(parameter, ACCUMULATOR)

    # ---- step graphs

    def clocks(self, graph: Joining) -> Clocks:
        """The clocks as they would be after `join(graph)`. Changes nothing."""
        return self._clocks.joined(graph.inputs.values(), graph.held, graph.moving, self.counts)[0]

    def join(self, graph: Joining) -> None:
        """Registers a new step graph.

        A clock counts parameters that every graph updates together. A graph that updates only some
        of them splits the clock, and graphs made before become wrong (`version`).
        """
        self.register(graph.inputs)
        parameters = graph.inputs.values()
        self._clocks, parted = self._clocks.joined(
            parameters, graph.held, graph.moving, self.counts
        )
        if parted:
            self.version += 1

    def restart(self, names: Mapping[torch.Tensor, str]) -> bool:
        """Forgets all step graphs, renames the parameters, and drops the state of parameters not in
        `names`. Returns whether any state was dropped."""
        super().restart(names)
        self._clocks = Clocks()
        gone = [p for p in self.state.tensors if p not in self.names]
        self.state.drop(gone)
        return bool(gone)

    def owned(self, signature: Signature) -> dict[str, torch.Tensor]:
        """The state tensors that a graph reads, by graph input."""
        slots = {
            name: self.state.tensor(self._parameters[slot.parameter], slot.name)
            for slot, name in signature.slots.items()
        }
        return slots | super().owned(signature)

    # ---- stepping

    @property
    def counts(self) -> Mapping[torch.Tensor, int]:
        """The number of updates of each parameter that has state."""
        return self.state.counts

    def inputs(self, signature: Signature) -> dict[str, int]:
        """The number of the next update, counted from 1, by the graph input of each clock."""
        return {
            name: self.state.counts.get(self._clocks.members(clock)[0], 0) + 1
            for clock, name in signature.clocks.items()
        }

    def advance(self, signature: Signature) -> bool:
        """Counts one update of the parameters that the step updates. Returns whether any of them
        had no count before."""
        self.done += 1
        self.window = frozenset()
        return self.state.count(
            p for clock in signature.clocks for p in self._clocks.members(clock)
        )

    # ---- on several ranks

    def shards(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
        """The parts that this rank updates, of these parameters by name that are cut."""
        found = {name: self.state.shards.of(p) for name, p in parameters.items()}
        return {name: shard for name, shard in found.items() if shard is not None}

    def summed_parts(self, parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """The names of the parameters of whose gradients a rank sums a part alone over a window."""
        of_sums = self.state.shards.of_sums
        return tuple(name for name, p in parameters.items() if row_of(of_sums(p)) is not None)

    # ---- taken over and restored

    def adopt(self, found: Mapping[torch.Tensor, ParameterState]) -> None:
        """Takes over moments and counts found elsewhere, replacing its own."""
        self.state.adopt(found)
        if self._clocks.disagree(self.state.counts):
            self._forget_clocks()

    def release(self) -> None:
        self.state.release_all()

    def restore(
        self,
        parameters: Mapping[str, torch.Tensor],
        tensors: Mapping[StateKey, torch.Tensor],
        counts: Mapping[str, int],
        done: int,
    ) -> None:
        """Replaces all state by saved tensors and counts. tensors: by parameter name and slot.
        counts and parameters: by parameter name."""
        slots: dict[str, dict[str, torch.Tensor]] = {path: {} for path in counts}
        sums = {path: t for (path, slot), t in tensors.items() if slot == ACCUMULATOR}
        for (path, slot), tensor in tensors.items():
            if slot != ACCUMULATOR:
                slots[path][slot] = tensor
        found: dict[torch.Tensor, ParameterState] = {}
        for path, held in slots.items():
            p = parameters[path]
            found[p] = ParameterState(counts[path], held, found_form(self.record, held, p))
        self.adopt(found)
        self.restore_sums(parameters, sums, done)

    def _forget_clocks(self) -> None:
        self._clocks = Clocks()
        self.version += 1


__all__ = ["Joining", "UpdateState"]
