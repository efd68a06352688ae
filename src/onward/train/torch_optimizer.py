"""TorchOptimizer: a torch optimizer whose updates are made by step graphs.

Its `param_groups` and `state` stay authoritative: changes made to them since the last step are
taken over before the next (`torch_state.py`). The numbers are kept in an `UpdateState`, which step
graphs read and write. torch counts updates per parameter; here parameters that have always been
updated together share a count (`clocks.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from onward.differentiate import UpdateGroup
from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.execute import StateStore
from onward.graph.signature import Signature
from onward.graph.types import DType
from onward.train.cut_tensors import ChosenCut, is_elsewhere
from onward.train.held_optimizer import HeldOptimizer, paths_of
from onward.train.optim import (
    check_parameters,
    check_settings,
    hyperparameters,
    record_of,
    rules,
    update_group,
)
from onward.train.optimizer_owner import check_free, give_back, is_free, require_owner, take
from onward.train.optimizer_state import ParameterState, StateKey
from onward.train.parameter_groups import embedding_tables
from onward.train.state_form import StateForms
from onward.train.state_shards import StateShards
from onward.train.torch_state import TorchState, release
from onward.train.update_state import Joining, UpdateState


class TorchOptimizer(HeldOptimizer[UpdateState]):
    """The optimizer of a Trainer, with the state that its updates read and write (`updates`).

    optimizer_state: the form of the moments, `TrainerOptions.optimizer_state`. sums: the type of
    fp32 parameters' accumulators, `TrainerOptions.gradient_accumulation_dtype`. mesh, zero: the
    ranks over which the state is cut, `TrainerOptions.zero`. store: where the moments lie
    (`TrainerOptions.offload_optimizer`); None: beside the weights. Raises OnwardError for an
    optimizer without an update op, or with parameters that are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        optimizer_state: str = "fp32",
        sums: str = "fp32",
        mesh: Mesh | None = None,
        zero: int = 0,
        store: StateStore | None = None,
    ) -> None:
        self.record = record_of(optimizer)
        paths = paths_of(model)
        self._places = _places(optimizer)
        # functions that do not hold this object: the optimizer's state, which reads them, outlives
        # the Trainer
        settings = partial(_settings, optimizer, self._places)
        self._forms = StateForms(optimizer_state, self.record, partial(_is_table, model), settings)
        self._forms.check(optimizer.param_groups)
        accumulator = DType.BFLOAT16 if sums == "bf16" else None
        shards = StateShards(mesh or Mesh(), zero, self.record, self._forms)
        shards.assign(self._places)
        updates = UpdateState(self.record, self._forms, paths, accumulator, shards, store)
        super().__init__(model, optimizer, updates)
        self._rules = rules(optimizer, optimizer.param_groups)
        check_parameters(optimizer, paths, type(model).__name__)
        check_free(optimizer)
        release(optimizer)
        self._shared = TorchState(optimizer, self.record, self.updates.state)
        self._adopt(self._shared.read(paths))
        self.updates.done = self.updates.state.most_updates(default=0)
        take(optimizer, self)

    # ---- who steps

    def require_owner(self) -> None:
        """Raises OnwardError where a later Trainer has taken the optimizer."""
        require_owner(self.torch, self)

    def give_back(self) -> None:
        """Restores torch's own `step()`. Adds the summed gradients of an open window to `p.grad`,
        as if each micro-batch had been an eager backward."""
        give_back(self.torch, self)
        self.show_sums()

    def take_again(self) -> bool:
        """Takes ownership again after `give_back`; returns whether the optimizer was free. The next
        `sync` takes over what its own steps did."""
        free = is_free(self.torch)
        if free:
            take(self.torch, self)
        return free

    def bytes_saved(self, optimizer_state: str, parameters: Iterable[torch.Tensor]) -> int:
        own, parts = self._forms, self.updates.state.shards
        if self.updates.state.store is not None:
            return 0
        try:
            other = own.asked(optimizer_state)
            other.check(self.torch.param_groups)
        except OnwardError:
            return 0
        cut = parts.in_forms(other)
        return sum(own.nbytes(p, parts.like(p)) - other.nbytes(p, cut.like(p)) for p in parameters)

    # ---- stepping

    def sync(self) -> None:
        """Takes over changes made to the optimizer since the last step.

        Raises OnwardError for changes that cannot be taken over; nothing has changed then.
        """
        self.require_owner()
        self.check_groups(self.torch.param_groups)
        now = rules(self.torch, self.torch.param_groups)
        changed = now != self._rules
        if not changed and self._shared.is_unchanged:
            return
        if changed:
            known = {**self.updates.names, **paths_of(self.model)}
            check_parameters(self.torch, known, type(self.model).__name__)
            self._places.clear()
            self._places |= _places(self.torch)
            self.updates.state.shards.assign(self._places)
        # also of parameters that are out of the model for a while, and go on when they are back
        found, loaded = self._shared.read(self.names_kept()), self._shared.is_replaced
        if changed:
            self._restart()
            self._rules = now
        self._adopt(found)
        if loaded:
            self.updates.done = self.updates.state.most_updates(default=self.updates.done)

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises OnwardError for a setting that no step graph has, in any of these parameter
        groups."""
        check_settings(self.torch, groups)
        self._forms.check(groups)

    def inputs(self, signature: Signature) -> dict[str, float | int]:
        """Hyperparameters and step counts of the next update, by graph input."""
        return {**self.hyperparameters(signature), **self.updates.inputs(signature)}

    def hyperparameters(self, signature: Signature) -> dict[str, float]:
        """Hyperparameters of the next update, by graph input."""
        groups = [hyperparameters(self.torch, g) for g in self.torch.param_groups]
        return {name: groups[h.group][h.name] for h, name in signature.hyperparameters.items()}

    def advance(self, signature: Signature) -> None:
        """Counts one update of the parameters that the step updates."""
        if self.updates.advance(signature):
            self._shared.share()
        else:
            self._shared.write_counts()
        self.torch._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

    # ---- what a step graph needs

    def groups(
        self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]
    ) -> list[UpdateGroup]:
        """The update groups of a step graph: one for each param_group, clock and form of state.
        Changes nothing.

        parameters: by graph input. reached: graph inputs that the loss depends on. Other parameters
        get no update, as in torch, and their clocks do not move.
        """
        graph = self._joining(parameters, reached)
        clocks, moving = self.updates.clocks(graph), set(graph.moving)
        names = {p: n for n, p in parameters.items()}
        found: dict[tuple[int, int, str, tuple[str, ...]], list[str]] = {}
        for i, group in enumerate(self.torch.param_groups):
            for p in group["params"]:
                if p in moving:
                    form = self.updates.state.form(p)
                    slots = self._slots(p, form)
                    found.setdefault((i, clocks.of[p], form, slots), []).append(names[p])
        return [
            update_group(self.torch, i, tuple(inputs), clock, form, slots)
            for (i, clock, form, slots), inputs in sorted(found.items())
        ]

    def _slots(self, parameter: torch.Tensor, form: str) -> tuple[str, ...]:
        """The names of the tensors that an update of this parameter reads and writes."""
        forms = self.record.forms
        return tuple(forms[form].tensors) if form else self.updates.state.required(parameter)

    def join(self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]) -> None:
        """Registers a new step graph, which may split clocks. `groups` returns the same before and
        after."""
        self.updates.join(self._joining(parameters, reached))

    def _joining(self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]) -> Joining:
        names = {p: n for n, p in parameters.items()}
        groups = self.torch.param_groups
        held = [p for g in groups for p in g["params"] if p in names and p.requires_grad]
        return Joining(parameters, held, [p for p in held if names[p] in reached])

    def _restart(self) -> None:
        """Forgets all step graphs, since the model or the param_groups have changed. Parameters
        that only the optimizer still holds keep their names."""
        if self.updates.restart(self.names_kept()):
            self._shared.share()  # share the counts of the remaining parameters

    def cut_tensors(self, cuts: Mapping[torch.Tensor, ChosenCut]) -> None:
        """Has this rank hold its part of these parameters' state. An open window goes on with the
        sums of those that it has."""
        self.updates.state.cut_tensors(cuts)
        elsewhere = (p for p, cut in cuts.items() if is_elsewhere(cut))
        self.updates.window -= {self.updates.names[p] for p in elsewhere if p in self.updates.names}
        self._shared.share()

    # ---- saved and restored

    @contextmanager
    def gathered(self) -> Generator[None]:
        with self._shared.gathered():
            yield

    def named(self, to_first: bool = False) -> dict[StateKey, torch.Tensor]:
        """State tensors by path and slot, with the accumulators of an open window. to_first: rank 0
        alone gets those of which each rank has a part."""
        return self.updates.state.named(paths_of(self.model), self.updates.window, to_first)

    def named_counts(self) -> dict[str, int]:
        """Counts of updates, by path, of the parameters that have state tensors."""
        return self.updates.state.named_counts(paths_of(self.model))

    def restore(
        self, tensors: Mapping[StateKey, torch.Tensor], counts: Mapping[str, int], done: int
    ) -> None:
        """Replaces all state by tensors and counts from `named` and `named_counts`."""
        parameters = {path: p for p, path in paths_of(self.model).items()}
        self.is_half_restored = True  # until all of the Trainer's state is restored
        self._shared.forget(parameters.values())
        self.updates.restore(parameters, tensors, counts, done)
        self._shared.share()

    def _adopt(self, found: Mapping[torch.Tensor, ParameterState]) -> None:
        """Takes over the found state and counts, and shares them with the optimizer."""
        self.updates.adopt(found)
        self._shared.share()


def _places(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """The number of each parameter's group."""
    return {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _settings(
    optimizer: torch.optim.Optimizer,
    places: Mapping[torch.Tensor, int],
    parameter: torch.Tensor,
) -> Mapping[str, Any]:
    """The settings of a parameter: those of its group, or else the optimizer's defaults."""
    place = places.get(parameter)
    return optimizer.defaults if place is None else optimizer.param_groups[place]


def _is_table(model: nn.Module, parameter: torch.Tensor) -> bool:
    return parameter in embedding_tables(model)


__all__ = ["TorchOptimizer"]
