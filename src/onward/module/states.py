"""States of a module that calls have met, and the graphs of each.

A graph holds as long as the guards of its state do. A module that goes back to a state it was in
(a head frozen for every other step, a setting for evaluation) finds its graphs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from onward.capture import CapturedModule
from onward.errors import CaptureError
from onward.module.around import Mode, device_of
from onward.module.calls import RefusedBatches
from onward.module.prepared_call import PreparedCall
from onward.prepare.batch import Batch
from onward.prepare.guards import Guards

KEPT = 8  # states, the one that was met last first
OFTEN = 10  # changes of one attribute, from which on a state is to be met as often for a graph
GRAPHS = 32  # of one kind of batch, for sizes that share none
KINDS = 256  # of batches, in one state
VALUES = 8  # of arguments that are no tensors, each of which has graphs of its own
_training = attrgetter("training")


class TooMany(CaptureError):
    """A graph is not made since too many were; for another call like this one may be."""


@dataclass
class State:
    """calls: by training flags, mode, and the kind of the batch. met: how often."""

    guards: Guards
    modules: list[torch.nn.Module]
    device: torch.device
    met: int = 0
    calls: dict[Any, RefusedBatches] = field(default_factory=dict)

    def find(self, batch: Batch, mode: Mode) -> PreparedCall | str | None:
        """What runs the batch at the module's training flags now, or why it runs in eager; None
        where that is not known yet."""
        calls = self.calls.get(self._key(batch, mode))
        return None if calls is None else calls.find(batch)

    def trained(self, batch: Batch, mode: Mode) -> CapturedModule | None:
        """What was captured of such a call in training, where this one is in evaluation and without
        gradients."""
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
        """The calls of such batches, to be added to."""
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
        """Raises TooMany where it does not pay to make a graph, since each call would."""
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
        """Whether each submodule is in training mode, in order."""
        return tuple(map(_training, self.modules))


class States:
    """The states that one module has been in, the one that was met last first."""

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
            return self._met(0)
        for i, state in enumerate(self._states):
            if i and state.guards.saw(guards):  # as a list that is made anew says what it said
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
        """Whether a graph for batches of this kind, of any sizes, was made in any state."""
        kept = (item for state in self._states for item in state.calls.items())
        return any(len(calls) and key[2:] == batch.kind for key, calls in kept)

    def clear(self) -> None:
        self._states.clear()

    def __iter__(self) -> Any:
        return iter(self._states)


__all__ = ["State", "States", "TooMany"]
