"""Who makes the updates of a Trainer: its step graphs, or the optimizer's own `step()`."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch

from onward.distribute import Mesh
from onward.errors import CaptureError, OnwardError
from onward.execute import Memory, StateStore
from onward.options import TrainerOptions
from onward.prepare.guards import code_around_step
from onward.train.held_optimizer import HeldOptimizer
from onward.train.optim import check_settings, record_of
from onward.train.own_step import OwnStep
from onward.train.torch_optimizer import TorchOptimizer

log = logging.getLogger("onward")


def why_own_step(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why no step graph can make the updates of this optimizer; None where one can."""
    try:
        record_of(optimizer)
    except OnwardError:
        return f"{type(optimizer).__qualname__} has no update in a graph"
    try:
        check_settings(optimizer, optimizer.param_groups)
    except OnwardError as error:
        return f"{str(error).partition(' is not supported')[0]} has no update in a graph"
    return code_around_step(optimizer)


def check_own_step(optimizer: torch.optim.Optimizer, why: str, options: TrainerOptions) -> None:
    """Raises OnwardError where the optimizer cannot make its updates itself on the gradients of a
    step graph, and for options about an update that is in the graph."""
    name = type(optimizer).__name__
    if options.strict:
        raise CaptureError(
            f"{why}, and strict=True allows no update outside of the graph; fix: strict=False, or "
            "an optimizer of onward.optim without code around its step"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OnwardError(
            "SparseAdam takes sparse gradients only, and those of a graph are dense; fix: "
            "torch.optim.AdamW"
        )
    for i, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OnwardError(
                f"differentiable=True in parameter group {i} is not supported: no later loss is "
                "differentiated through an update; fix: leave it out"
            )
    if _needs_closure(optimizer):
        raise OnwardError(
            f"{name}.step needs a closure that evaluates the loss again, which a step graph is "
            "not; fix: another optimizer, or onward.accelerate(model) in a loop of your own"
        )
    if options.optimizer_state != TrainerOptions().optimizer_state:
        raise OnwardError(
            f"optimizer_state={options.optimizer_state!r} is not supported where the optimizer "
            f"makes its updates itself ({why}); fix: leave it out"
        )

    if options.offload_optimizer is not None:
        raise OnwardError(
            f"offload_optimizer={options.offload_optimizer!r} is not supported where the optimizer "
            f"makes its updates itself ({why}), with state of its own; fix: leave it out"
        )


def state_store(options: TrainerOptions, device: torch.device) -> StateStore | None:
    """Where the options keep the optimizer's state; None: beside the weights. Raises OnwardError
    for a folder that takes no files."""
    if options.offload_dir is not None:
        return StateStore(device, Path(options.offload_dir))
    if options.offload_optimizer is None:
        return None
    if device.type == "cpu":
        log.info(
            'offload_optimizer="cpu" changes nothing: the weights are in the host\'s memory, and '
            "the optimizer's state is beside them"
        )
        return None
    return StateStore(device)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` cannot be called without arguments."""
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # a function of C without a signature
        return False
    return False


def held_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: TrainerOptions,
    memory: Memory,
    why: str | None,
    mesh: Mesh | None = None,
) -> HeldOptimizer[Any]:
    """Takes an optimizer for a Trainer. why: see `why_own_step`; a log line says it. mesh: the
    ranks that train together. Raises OnwardError for one that cannot be trained with."""
    sums = options.gradient_accumulation_dtype
    if why is None:
        form, stage = options.optimizer_state, options.zero
        if memory.store is None:
            memory.store = state_store(options, memory.device)
        return TorchOptimizer(model, optimizer, form, sums, mesh, stage, memory.store)
    check_own_step(optimizer, why, options)
    held = OwnStep(model, optimizer, why, memory, sums)
    log.warning(
        "%s: the step graph ends with the gradients, and %s.step() makes the update",
        why,
        type(optimizer).__name__,
    )
    return held


__all__ = ["check_own_step", "held_optimizer", "state_store", "why_own_step"]
