"""Optimizer state: tensors by parameter and slot in the session's memory, and counts of updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from onward.execute import zeros

ACCUMULATOR = "accumulator"  # of gradients, within a window; a slot as those of the optimizer


class StateKey(NamedTuple):
    """A state tensor by its parameter's path in the model, and its slot."""

    path: str
    slot: str


class ParameterState(NamedTuple):
    """State of one parameter: its count of updates, its tensors by slot."""

    count: int
    tensors: dict[str, torch.Tensor]


class OptimizerState:
    """Tensors by parameter and slot; `counts`: updates of the parameters that have state.

    slots: those of the optimizer (`exp_avg`, ...). A parameter's accumulator is beside them.
    """

    def __init__(self, slots: tuple[str, ...]) -> None:
        self.slots = slots
        self.tensors: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.counts: dict[torch.Tensor, int] = {}

    def tensor(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        """The parameter's tensor of that name, of its shape; made, zeroed, at first use."""
        held = self.tensors.setdefault(parameter, {})
        if slot not in held:
            held[slot] = zeros(parameter.shape, parameter.dtype, parameter.device)
        return held[slot]

    def begun(self) -> list[torch.Tensor]:
        """The parameters that the optimizer keeps tensors for."""
        return [p for p in self.counts if any(s in self.tensors.get(p, {}) for s in self.slots)]

    def most_updates(self, default: int) -> int:
        """Of the parameter that had most; `default` where none has state."""
        return max(self.counts.values(), default=default)

    def count(self, moved: Iterable[torch.Tensor]) -> bool:
        """One update more of these; returns whether one of them had none before."""
        moved = list(moved)
        fresh = any(p not in self.counts for p in moved)
        for p in moved:
            self.counts[p] = self.counts.get(p, 0) + 1
        return fresh

    def adopt(self, found: Mapping[torch.Tensor, ParameterState]) -> None:
        """Copies into these tensors what lies elsewhere, zeroes what was not found, and takes the
        counts."""
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        ours = {t.data_ptr() for held in self.tensors.values() for t in held.values() if t.numel()}
        with torch.no_grad():
            for p, item in found.items():
                for slot, tensor in item.tensors.items():
                    own = self.tensor(p, slot)
                    if tensor.data_ptr() == own.data_ptr() and tensor.stride() == own.stride():
                        continue
                    # one of ours in the place of another is read before it is written
                    elsewhere.append((own, tensor.clone() if tensor.data_ptr() in ours else tensor))
            for p, held in self.tensors.items():
                for slot in self.slots:
                    if slot in held and (p not in found or slot not in found[p].tensors):
                        held[slot].zero_()
            for own, tensor in elsewhere:
                own.copy_(tensor)
        self.counts = {p: item.count for p, item in found.items()}

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forgets what is kept for these."""
        for p in parameters:
            del self.tensors[p]
            self.counts.pop(p, None)

    def named(
        self, paths: Mapping[torch.Tensor, str], window: frozenset[str]
    ) -> dict[StateKey, torch.Tensor]:
        """The tensors of parameters with these paths, and the accumulators of those in `window`."""
        found: dict[StateKey, torch.Tensor] = {}
        for p, path in paths.items():
            held = self.tensors.get(p, {})
            slots = [s for s in self.slots if p in self.counts and s in held]
            if path in window:
                slots.append(ACCUMULATOR)
            found |= {StateKey(path, slot): self.tensor(p, slot) for slot in slots}
        return found

    def named_counts(self, paths: Mapping[torch.Tensor, str]) -> dict[str, int]:
        """Updates that each parameter with state has had, by path."""
        begun = set(self.begun())
        return {paths[p]: n for p, n in self.counts.items() if p in paths and p in begun}
