"""Several processes of transformers' Trainer, as torchrun or `accelerate launch` starts them.

Where a step is one graph, its collectives make the exchange, and the model is not wrapped in
DistributedDataParallel. Where gradients have to be visible from the start, transformers' own code
makes the update, and accelerate wraps the accelerated model as it always does. A run cannot change
from the first way to the second: without the wrapper nothing would exchange gradients.

Processes along `tp` and `cp` take the same batches. Where each holds a part of the weights, the
model is whole while transformers evaluates, saves and loads it, and when training has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from onward.distribute import Mesh, rank_on
from onward.errors import OnwardError
from onward.mesh_sizes import AUTO, auto_sizes
from onward.options import TrainerOptions

LOOP = "transformers.Trainer with onward.accelerate(model)"


def options_of_ranks(options: TrainerOptions, processes: int) -> TrainerOptions:
    """The options for a Trainer on this many processes, all of which are its mesh by default.
    Raises OnwardError for a mesh of another number of ranks, and for one that cannot train in a
    loop which says itself what each micro-batch weighs."""
    mesh = options.mesh
    if mesh in (None, AUTO) and processes > 1:  # the sampler has shared the data by then
        options = replace(options, mesh=auto_sizes(processes, options.zero))
    elif mesh is not None and not isinstance(mesh, str) and prod(mesh.values()) != processes:
        ranks = prod(mesh.values())
        started = "one process is" if processes == 1 else f"{processes} processes are"
        raise OnwardError(
            f"options has a mesh of {ranks} ranks ({dict(mesh)}), but {started} started; fix: "
            f"torchrun --nproc-per-node={ranks}, or leave mesh out, which takes all processes"
        )
    try:
        replace(options, gradient_accumulation_average="micro_batches")
    except OnwardError as error:
        told, _, _ = str(error).partition("; fix: ")
        raise OnwardError(
            f"transformers.Trainer says itself what each micro-batch weighs, but {told}; fix: "
            "another mesh, or onward.Trainer"
        ) from error
    return options


def mesh_of(options: TrainerOptions, process: int) -> Mesh:
    """The place of a process on the mesh of the options; one rank where there is none."""
    mesh = options.mesh
    if mesh is None or isinstance(mesh, str):
        return Mesh()
    return rank_on(mesh, process)


def copies_of_batches(mesh: Mesh) -> int:
    """The number of processes that take one batch: those along axes that share no data."""
    return mesh.ranks // mesh.batches


def share_batches(loader: Any, mesh: Mesh) -> Any:
    """The training batches that accelerate has shared out among all processes, shared out among
    those along axes of data alone: others take the batches of their share. Raises OnwardError for
    batches that one process makes and sends to the others."""
    if copies_of_batches(mesh) == 1:
        return loader
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSamplerShard):
        raise OnwardError(
            f"the batches of a {type(loader).__name__} are not chosen by their number, so that the "
            f"processes of the mesh {mesh} cannot take those of their share; fix: a dataset with "
            "__len__ and __getitem__, and no dispatch_batches in accelerator_config"
        )
    sampler.num_processes, sampler.process_index = mesh.batches, mesh.share
    if mesh.batches == 1:  # one process would not fill the last batch either
        sampler.even_batches = False
    return loader


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


def factor_of_loss(mesh: Mesh, args: Any, by_items: bool) -> float:
    """The factor of each rank's loss before the mean over shares is taken, as in `compute_loss`.
    by_items: the loss is a sum divided by the number of items in the window, which is that of all
    ranks where `average_tokens_across_devices` is set."""
    is_shared = by_items and getattr(args, "average_tokens_across_devices", False)
    return float(mesh.batches) if is_shared else 1.0


def items_of_shares(items: Any, mesh: Mesh, args: Any) -> Any:
    """The number of items in the window, each counted once. items: counted once by each process,
    where `average_tokens_across_devices` is set."""
    is_counted = getattr(args, "average_tokens_across_devices", False)
    copies = copies_of_batches(mesh) if is_counted else 1
    return items if items is None or copies == 1 else items / copies


__all__ = [
    "LOOP", "copies_of_batches", "factor_of_loss", "items_of_shares", "leave_unwrapped", "mesh_of",
    "options_of_ranks", "refuse_lost_exchange", "refuse_uneven_batches", "share_batches",
]  # fmt: skip
