"""TrainerSnapshot: the public, read-only view of a Trainer at one moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.options import TrainerOptions
from onward.train.last_run import LastRun


@dataclass(frozen=True)
class TrainerSnapshot:
    """A Trainer's state between two steps; later steps do not change it.

    optimizer: class name of the torch optimizer. updates: number done. micro_steps: micro-batches
    done in the open accumulation window. loss_scale: of the next micro-batch; None where losses are
    not scaled. last: the training step that ran last, with its batch, request and plan; None before
    the first. model: the Trainer's own, not a copy. mesh: the ranks that train together, and which
    of them this process is.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: str
    options: TrainerOptions
    updates: int
    micro_steps: int
    loss_scale: float | None
    last: LastRun | None
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def last_run(self) -> LastRun:
        """The training step that ran last. Raises OnwardError before the first."""
        if self.last is None:
            raise OnwardError("no step has run yet; fix: call train_step first")
        return self.last


__all__ = ["TrainerSnapshot"]
