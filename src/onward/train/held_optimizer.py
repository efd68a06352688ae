"""HeldOptimizer: a torch optimizer in a Trainer's hands, whoever makes its updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import nn

from onward.differentiate import UpdateGroup
from onward.execute import Executable
from onward.graph.signature import Signature
from onward.train.gradient_sums import GradientSums
from onward.train.turned import turned_like

Sums = TypeVar("Sums", bound=GradientSums)


class HeldOptimizer(ABC, Generic[Sums]):
    """The optimizer of a Trainer and the model whose parameters it updates.

    updates: the tensors that step graphs read and write, and the number of updates. why: the reason
    why the optimizer makes its updates itself; None where step graphs do. is_stepping: whether its
    `step()` runs at this moment. is_half_restored: whether an exception interrupted the restoring
    of a state.
    """

    why: str | None = None
    is_stepping = False
    is_half_restored = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, updates: Sums) -> None:
        self.model, self.torch, self.updates = model, optimizer, updates
        self._tensors = _tensors(model)

    # ---- who steps

    @property
    def window(self) -> frozenset[str]:
        """Names of the parameters whose gradients the open window has summed."""
        return self.updates.window

    def require_owner(self) -> None:
        """Raises OnwardError where a later Trainer has taken the optimizer."""

    @abstractmethod
    def give_back(self) -> None:
        """Leaves the optimizer to another training loop. Adds the summed gradients of an open
        window to `p.grad`, as if each micro-batch had been an eager backward."""

    @abstractmethod
    def take_again(self) -> bool:
        """Takes the optimizer again after `give_back`; returns whether it was given back."""

    def show_sums(self) -> None:
        """Adds the summed gradients of the open window to `p.grad`, and closes the window."""
        with torch.no_grad():
            for p, total in self.updates.summed().items():
                summed = turned_like(p, total.to(p.dtype, copy=True))
                p.grad = summed if p.grad is None else p.grad + summed
        self.updates.window = frozenset()

    @property
    def own_state_bytes(self) -> int:
        """Bytes of the state tensors that no step graph holds."""
        return 0

    def bytes_saved(self, optimizer_state: str, parameters: Iterable[torch.Tensor]) -> int:
        """The bytes by which the state of these parameters would be smaller with that value of
        `TrainerOptions.optimizer_state`; 0 where it cannot be asked for."""
        return 0

    @contextmanager
    def gathered(self) -> Generator[None]:
        """A context in which the optimizer's own `state_dict` is whole on rank 0, also where each
        rank has a part of its state. All ranks enter it."""
        yield

    # ---- stepping

    @abstractmethod
    def sync(self) -> None:
        """Takes over changes made to the optimizer since the last step. Raises OnwardError for
        changes that cannot be taken over; nothing has changed then."""

    @abstractmethod
    def inputs(self, signature: Signature) -> dict[str, float | int]:
        """Hyperparameters and step counts of the next update, by graph input."""

    @abstractmethod
    def advance(self, signature: Signature) -> None:
        """Ends a window whose update the graph has made, or whose gradients it has left."""

    def step(self, executable: Executable) -> None:
        """Makes the update of a window whose gradients this executable has left; does nothing where
        the graph has made it."""

    # ---- what a step graph needs

    def groups(
        self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]
    ) -> list[UpdateGroup]:
        """The update groups of a step graph. parameters: by graph input. reached: graph inputs that
        the loss depends on. Changes nothing."""
        return []

    def left_gradients(
        self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]
    ) -> list[str]:
        """The graph inputs whose gradients a step graph leaves; arguments as in `groups`."""
        return []

    @abstractmethod
    def join(self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]) -> None:
        """Registers a new step graph."""

    def follow(self) -> bool:
        """Updates the record of the model's parameters and buffers. Returns whether any was
        replaced, renamed or moved in memory, which makes steps of earlier model states unusable."""
        found = _tensors(self.model)
        changed = found != self._tensors
        if changed:
            self._tensors = found
            self._restart()
        return changed

    def _restart(self) -> None:
        """Forgets all step graphs, since the model or the param_groups have changed."""
        self.updates.restart(self.names_kept())

    def names_kept(self) -> dict[torch.Tensor, str]:
        """The names of the model's parameters. Those that only the optimizer still holds keep
        theirs."""
        held = {p for g in self.torch.param_groups for p in g["params"]}
        kept = {p: path for p, path in self.updates.names.items() if p in held}
        return kept | paths_of(self.model)

    def paths(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """The paths of parameters in the model; "" for one that is not in it."""
        paths = paths_of(self.model)
        return [paths.get(p, "") for p in parameters]


def paths_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """The path of each parameter in the model."""
    return {p: n for n, p in model.named_parameters()}


def _tensors(model: nn.Module) -> dict[torch.Tensor, tuple[str, int]]:
    """The path and the address of each parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {t: (n, t.data_ptr() if t.layout is torch.strided else 0) for n, t in named}


__all__ = ["HeldOptimizer", "paths_of"]
