"""States of a module that calls have met, and the graphs of each.

A graph holds as long as the guards of its state do. A module that goes back to a state it was in
(a head frozen for every other step, a setting for evaluation) finds its graphs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from onward.module.calls import Calls
from onward.train.batch import Batch
from onward.train.guards import Guards

KEPT = 8  # states, the one that was met last first
_training = attrgetter("training")


@dataclass
class State:
    """calls: by training flags, gradients on or off, and the kind of the batch."""

    guards: Guards
    modules: list[torch.nn.Module]
    calls: dict[Any, Calls] = field(default_factory=dict)

    def of(self, batch: Batch, grad: bool) -> Calls:
        """The calls of batches of this kind, at the module's training flags now. grad: whether
        gradients are on."""
        key = (self.flags(), grad, batch.kind)
        found = self.calls.get(key)
        if found is None:
            found = self.calls[key] = Calls()
        return found

    def flags(self) -> tuple[bool, ...]:
        """Of every submodule, whether it is in training mode."""
        return tuple(map(_training, self.modules))


class States:
    """Of one module."""

    def __init__(self) -> None:
        self._states: list[State] = []

    def now(self, model: torch.nn.Module) -> State:
        """The state that the module is in."""
        for i, state in enumerate(self._states):
            if state.guards.same(model):
                if i:
                    self._states.insert(0, self._states.pop(i))
                return state
        guards = self._states[0].guards.successor() if self._states else Guards()
        changed = guards.changed(model, None, training=False)
        if self._states and not changed:  # other objects, and all that they say is the same
            self._states[0].guards = guards
            self._states[0].modules = list(model.modules())
        else:
            self._states.insert(0, State(guards, list(model.modules())))
            del self._states[KEPT:]
        return self._states[0]

    def clear(self) -> None:
        self._states.clear()

    def __iter__(self) -> Any:
        return iter(self._states)


__all__ = ["State", "States"]
