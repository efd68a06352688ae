"""States of a module at its calls, and the prepared calls of each.

A graph holds as long as the guards of its state do. A module that returns to an earlier state (a
head frozen for every other step, a setting for evaluation) finds its graphs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from onward.capture import CapturedModule
from onward.errors import CaptureError
from onward.model_state.device import device_of
from onward.module.around import Mode
from onward.module.calls import RefusedBatches
from onward.module.prepared_call import PreparedCall
from onward.prepare.batch import Batch
from onward.prepare.guards import Guards

KEPT = 8  # states, most recently used first
OFTEN = 10  # changes of one attribute after which a state must be met as often to get a graph
GRAPHS = 32  # graphs for one kind of batch, whose sizes need a graph each
KINDS = 256  # kinds of batches in one state
VALUES = 8  # values of a non-tensor argument, each of which needs its own graphs
_training = attrgetter("training")


class TooMany(CaptureError):
    """Raised instead of making yet another graph; a later call like this one may still get one."""


@dataclass
class State:
    """A state of the module. calls: by training flags, mode and kind of batch. met: calls made in
    it."""

    guards: Guards
    modules: list[torch.nn.Module]
    device: torch.device
    met: int = 0
    calls: dict[Any, RefusedBatches] = field(default_factory=dict)

    def find(self, batch: Batch, mode: Mode) -> PreparedCall | str | None:
        """Returns the prepared call for a batch at the module's present training flags, or why it
        runs in eager; None where neither is known yet."""
        calls = self.calls.get(self._key(batch, mode))
        return None if calls is None else calls.find(batch)

    def trained(self, batch: Batch, mode: Mode) -> CapturedModule | None:
        """For a call in evaluation mode without gradients, the capture of such a call in training
        mode, if any."""
        if mode.grad or any(self.flags()):
            return None
        before = (mode._replace(grad=True, inference=False), *batch.kind)
        for (_, *other), calls in self.calls.items():
            if tuple(other) == before:
                found = calls.find(batch)
                if isinstance(found, PreparedCall):
                    return found.captured
        return None

    def of(self, batch: Batch, mode: Mode) -> RefusedBatches:
        """The calls of such batches, for additions."""
        key = self._key(batch, mode)
        found = self.calls.get(key)
        if found is None:
            found = self.calls[key] = RefusedBatches()
            if len(self.calls) > KINDS:
                del self.calls[next(iter(self.calls))]
        return found

    def _key(self, batch: Batch, mode: Mode) -> tuple[Any, ...]:
        return self.flags(), mode, *batch.kind

    def refuse_more(self, batch: Batch, mode: Mode) -> None:
        """Raises TooMany where each call would need a new graph, so that making one does not
        pay."""
        path = self.guards.restless(OFTEN)
        if path is not None and self.met < OFTEN:
            raise TooMany(
                f"{path} has changed {OFTEN} times, and each value needs a new graph; fix: "
                "pass it as a tensor argument, or register it as a buffer"
            )
        flags, _, kind = self._key(batch, mode)
        others = [
            other.values
            for had, on, other in self.calls
            if (had, on) == (flags, mode) and other.parts == kind.parts and other != kind
        ]
        if len(others) >= VALUES:
            at = [i for i, seen in enumerate(zip(*others, strict=True)) if len({*seen}) > 1][-1]
            had = ", ".join(str(v[at][-1]) for v in others[:VALUES])
            raise TooMany(
                f"an argument that is not a tensor has had {VALUES} values ({had}), and each "
                "needs a new graph; fix: pass it as a tensor"
            )
        calls = self.calls.get((flags, mode, kind))
        if calls is not None and len(calls) >= GRAPHS:
            raise TooMany(
                f"{GRAPHS} graphs of other input shapes have been made, and none fits this "
                "one; fix: pad the inputs to a few shapes"
            )

    def flags(self) -> tuple[bool, ...]:
        """The training flag of each submodule, in order."""
        return tuple(map(_training, self.modules))


class States:
    """The states that one module has been in, most recently used first."""

    def __init__(self) -> None:
        self._states: list[State] = []

    def now(self, model: torch.nn.Module) -> State:
        """Finds or makes the state that the module is in, and moves it to the front."""
        for i, state in enumerate(self._states):
            if state.guards.same(model):
                return self._met(i)
        guards = self._states[0].guards.successor() if self._states else Guards()
        changed = guards.changed(model, None, training=False, count=False)
        if self._states and not changed:  # different objects with equal facts
            self._states[0].guards = guards
            self._states[0].modules = list(model.modules())
            return self._met(0)
        for i, state in enumerate(self._states):
            if i and state.guards.saw(guards):  # for instance a list rebuilt with equal elements
                state.modules = list(model.modules())
                return self._met(i)
        guards.count_changes()
        self._states.insert(0, State(guards, list(model.modules()), device_of(model)))
        del self._states[KEPT:]
        return self._met(0)

    def _met(self, i: int) -> State:
        state = self._states[i]
        if i:
            self._states.insert(0, self._states.pop(i))
        state.met += 1
        return state

    def prepared(self, batch: Batch) -> bool:
        """Whether any state has a graph for batches of this kind, at any sizes."""
        kept = (item for state in self._states for item in state.calls.items())
        return any(len(calls) and key[2:] == batch.kind for key, calls in kept)

    def clear(self) -> None:
        self._states.clear()

    def __iter__(self) -> Any:
        return iter(self._states)


__all__ = ["State", "States", "TooMany"]
