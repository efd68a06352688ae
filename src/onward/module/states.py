"""States of a module that calls have met, and the graphs of each.

A graph holds as long as the guards of its state do. A module that goes back to a state it was in
(a head frozen for every other step, a setting for evaluation) finds its graphs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from onward.module.prepared_call import PreparedCall
from onward.train.guards import Guards

KEPT = 8  # states, the one that was met last first
_training = attrgetter("training")


@dataclass
class State:
    """calls: by training flags, gradients on or off, and the kind of the batch; a string is the
    reason why such calls run in eager."""

    guards: Guards
    modules: list[torch.nn.Module]
    calls: dict[Any, list[PreparedCall] | str] = field(default_factory=dict)

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
                return self._met(i)
        guards = self._states[0].guards.successor() if self._states else Guards()
        changed = guards.changed(model, None, training=False, count=False)
        if self._states and not changed:  # other objects, and all that they say is the same
            self._states[0].guards = guards
            self._states[0].modules = list(model.modules())
            return self._states[0]
        for i, state in enumerate(self._states):
            if i and state.guards.saw(guards):  # as a list that is made anew says what it said
                state.modules = list(model.modules())
                return self._met(i)
        guards.count_changes()
        self._states.insert(0, State(guards, list(model.modules())))
        del self._states[KEPT:]
        return self._states[0]

    def _met(self, i: int) -> State:
        self._states.insert(0, self._states.pop(i))
        return self._states[0]

    def clear(self) -> None:
        self._states.clear()

    def __iter__(self) -> Any:
        return iter(self._states)


__all__ = ["State", "States"]
