"""Binding: the launches of a plan bound to memory at certain sizes; and the bindings kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from onward.kernels import KernelArguments
from onward.kernels.kernel import Launch


@dataclass(eq=False)
class Binding:
    """Bound launches. launches, inputs, outputs: in the plan's order and by the plan's names.
    flagged: arguments of the launches that detect bad input, by number, in order. runs: the
    threads that have run a range of launches to its end, up to its recording. replays: recorded
    ranges, each as the call that queues it (`recording.py`)."""

    launches: list[Launch] = field(default_factory=list)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    flagged: dict[int, KernelArguments] = field(default_factory=dict)
    runs: dict[range, set[int]] = field(default_factory=dict)
    replays: dict[range, Launch] = field(default_factory=dict)

    def again(self) -> Binding:
        """A copy to be bound at other sizes; nothing of it is recorded."""
        return Binding(list(self.launches), flagged=dict(self.flagged))


class Bindings:
    """The last bindings of a plan to one place in memory, by the sizes of the batch; at most
    `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: dict[tuple[int, ...], Binding] = {}  # most recently used last

    def take(self, dims: Mapping[str, int]) -> Binding | None:
        """The binding at these sizes, if it is kept."""
        key = tuple(dims.values())
        found = self._at.pop(key, None)
        if found is not None:
            self._at[key] = found
        return found

    def keep(self, dims: Mapping[str, int], binding: Binding) -> None:
        """Keeps a binding at these sizes, and drops the least recently used beyond `most`."""
        self._at[tuple(dims.values())] = binding
        while len(self._at) > self._most:
            del self._at[next(iter(self._at))]

    def clear(self) -> None:
        """Drops all of them: their memory has moved."""
        self._at.clear()


__all__ = ["Binding", "Bindings"]
