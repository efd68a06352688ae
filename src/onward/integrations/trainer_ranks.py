"""Several processes of transformers' Trainer, as torchrun or `accelerate launch` starts them.

Where a step is one graph, its collectives make the exchange, and the model is not wrapped in
DistributedDataParallel. Where gradients have to be visible from the start, transformers' own code
makes the update, and accelerate wraps the accelerated model as it always does. A run cannot change
from the first way to the second: without the wrapper nothing would exchange gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from onward.errors import OnwardError
from onward.mesh_sizes import AUTO, auto_sizes
from onward.options import TrainerOptions

LOOP = "transformers.Trainer with onward.accelerate(model)"


def options_of_ranks(options: TrainerOptions, processes: int) -> TrainerOptions:
    """The options for a Trainer on this many processes, all of which are its mesh by default.
    Raises OnwardError for a mesh of another number of ranks, and for weights or sequences in
    parts."""
    mesh = options.mesh
    if isinstance(mesh, Mapping) and mesh.get("cp", 1) > 1:
        raise OnwardError(
            "options has cp in its mesh, whose processes take one batch, but transformers.Trainer "
            "gives each process its own; fix: leave cp out, or onward.Trainer"
        )
    along_tp = isinstance(mesh, Mapping) and mesh.get("tp", 1) > 1
    if options.zero == 3 or along_tp:
        raise OnwardError(
            f"options has {'tp in its mesh' if along_tp else 'zero=3'}, by which processes hold "
            "parts of the weights, but transformers.Trainer reads and saves the model's own; fix: "
            "zero=2 without tp, or onward.Trainer"
        )
    if mesh in (None, AUTO) and processes > 1:  # the sampler has shared the data by then
        return replace(options, mesh=auto_sizes(processes, options.zero))
    if mesh is not None and not isinstance(mesh, str) and prod(mesh.values()) != processes:
        ranks = prod(mesh.values())
        started = "one process is" if processes == 1 else f"{processes} processes are"
        raise OnwardError(
            f"options has a mesh of {ranks} ranks ({dict(mesh)}), but {started} started; fix: "
            f"torchrun --nproc-per-node={ranks}, or leave mesh out, which takes all processes"
        )
    return options


def refuse_uneven_batches(accelerator: Any, args: Any) -> None:
    """Raises OnwardError where the processes may have other numbers of batches in an epoch, so that
    some would wait for others that have none left."""
    are_even = accelerator.even_batches or args.dataloader_drop_last
    if accelerator.num_processes > 1 and not are_even:
        raise OnwardError(
            'accelerator_config={"even_batches": False} may give processes other numbers of '
            "batches, which cannot train together; fix: leave it out, or dataloader_drop_last=True"
        )


def leave_unwrapped(accelerator: Any, gradients_seen: Callable[[], str | None]) -> None:
    """Makes the Accelerator of several processes prepare models for training without
    DistributedDataParallel, with the weights of rank 0 as that would, unless gradients_seen gives a
    reason why transformers makes the update."""
    if accelerator.num_processes == 1:
        return
    before = accelerator.prepare_model

    def prepare_model(
        model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        placed: dict[str, Any] = {"device_placement": device_placement}
        if evaluation_mode or gradients_seen() is not None:
            return before(model, **placed, evaluation_mode=evaluation_mode)
        made = before(model, **placed, evaluation_mode=True)
        _send_weights(made)
        return made

    accelerator.prepare_model = prepare_model


@torch.no_grad()
def _send_weights(model: torch.nn.Module) -> None:
    """Gives the model of every rank the parameters and buffers of rank 0, as
    DistributedDataParallel does when it is made: a new head may be drawn on each rank."""
    for tensor in (*model.parameters(), *model.buffers()):
        distributed.broadcast(tensor, 0)


def refuse_lost_exchange(accelerator: Any, model: object, why: str) -> None:
    """Raises OnwardError where transformers is to make an update of several processes with a model
    that no DistributedDataParallel wraps. why: it is to make it."""
    processes = accelerator.num_processes
    if processes > 1 and not isinstance(model, DistributedDataParallel):
        reason, _, _ = why.partition("; fix: ")
        raise OnwardError(
            f"on {processes} processes a step has to be one graph, which exchanges the gradients, "
            f"but {reason}; fix: {LOOP}, started in the same way"
        )


def factor_of_loss(accelerator: Any, args: Any, by_items: bool) -> float:
    """The factor of each rank's loss before the mean over ranks is taken, as in `compute_loss`.
    by_items: the loss is a sum divided by the number of items in the window, which is that of all
    ranks where `average_tokens_across_devices` is set."""
    is_shared = by_items and getattr(args, "average_tokens_across_devices", False)
    return float(accelerator.num_processes) if is_shared else 1.0


__all__ = [
    "LOOP", "factor_of_loss", "leave_unwrapped", "options_of_ranks", "refuse_lost_exchange",
    "refuse_uneven_batches",
]  # fmt: skip
