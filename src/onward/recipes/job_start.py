"""A job at its start: its Trainer and the first micro-batch, of which nothing has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onward.recipes.devices import moved, take_device
from onward.recipes.engines import onward_trainer
from onward.recipes.optimizers import optimizer_of

if TYPE_CHECKING:
    from onward.recipes.loop import Job
    from onward.recipes.tasks import Batch
    from onward.train import Trainer


def at_its_start(job: Job, model: Any) -> tuple[Trainer, Batch]:
    """The Trainer of a job's model, on the device of the run, and the first micro-batch as a run
    draws it."""
    config = job.config
    device = take_device(config)
    model.to(device)
    model.config.use_cache = False
    trainer = onward_trainer(model, optimizer_of(model, config), config)
    torch.manual_seed(config.seed)  # of what the task draws
    batch = job.first_batch(job.train, config.per_device_train_batch_size)
    return trainer, moved(batch, device)


__all__ = ["at_its_start"]
