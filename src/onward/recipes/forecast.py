"""What `onward finetune --dry_run` says of the first step before anything is trained: its memory by
kind, the largest batch that fits, the size of its graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import onward
from onward.errors import EagerWarning, OnwardError, one_line
from onward.explanation import StepExplanation
from onward.explanation.text import largest_line, memory_lines

_LARGE = 1 << 20  # elements of a tensor that is a weight
_WRITES_NOTHING = ("requires_grad_", "detach_", "share_memory_", "rename_", "resize_", "set_")

if TYPE_CHECKING:
    from onward.recipes.loop import Job


def forecast(job: Job) -> StepExplanation:
    """Explains the step of a job's first micro-batch, of which nothing runs. The model is built;
    weights of a model from scratch are allocated and never written, so that one larger than the
    memory can be explained too. Raises OnwardError for a step that cannot be explained."""
    from onward.recipes.devices import free_memory, training_device
    from onward.recipes.job_start import at_its_start
    from onward.recipes.start_model import build_model, from_scratch

    config = job.config
    # before the weights, which the step's memory counts
    free = free_memory(training_device(config))
    with _unset_weights() if from_scratch(config) else nullcontext():
        model: Any = build_model(config, job.model_config)
    trainer, batch = at_its_start(job, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)  # the explanation has its reasons
        return onward.explain(trainer, (), batch, memory=free)


def _unset_weights() -> AbstractContextManager[Any]:
    """A context in which parameters get no values: what no one writes takes no memory."""
    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode

    class Unset(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            named = kwargs or {}
            filled = args[0] if args else named.get("tensor")
            name = getattr(func, "__name__", "")
            writes = name.endswith("_") and name not in _WRITES_NOTHING
            large = isinstance(filled, Tensor) and filled.numel() > _LARGE  # through `.data`
            if writes and not name.endswith("__") and (isinstance(filled, nn.Parameter) or large):
                return filled
            return func(*args, **named)

    return Unset()


def forecast_lines(job: Job) -> tuple[list[str], dict[str, Any]]:
    """The forecast for a reader, and its numbers; where there is none, the reason alone."""
    import torch

    config = job.config
    if config.mesh is not None:
        return ["forecast   of a rank: onward explain --mesh"], {"reason": "a mesh"}
    if config.engine == "torch" and not config.compare:
        return ["forecast   none: eager PyTorch plans nothing"], {"reason": "engine torch"}
    try:
        found = forecast(job)
    except (OnwardError, MemoryError, torch.OutOfMemoryError) as error:
        told = one_line(str(error) or "no memory", 200)
        return [f"forecast   none: {told}"], {"reason": told}
    if found.memory is None or not found.captured:
        told = one_line("; ".join(found.reasons), 200)
        return [f"forecast   none: {told}"], {"reason": told}
    return list(_lines(found)), {
        "memory_bytes": found.memory.total,
        "memory": {kind: n for kind, n in found.memory.kinds.items() if n},
        "free_bytes": found.largest.memory if found.largest else None,
        "largest_batch": found.largest.batch_size if found.largest else None,
        "nodes": _nodes(found),
        "launches": found.launch_count,
    }


def _lines(found: StepExplanation) -> Iterator[str]:
    yield from memory_lines(found.memory)
    if found.largest is not None:
        yield largest_line(found.largest)
    captured, written = _nodes(found)
    rewritten = sum(1 for change in found.changes if change.edits)
    yield (
        f"graph: {captured} ops of the forward are captured; the step has {written} after "
        f"{rewritten} passes, in {found.launch_count} launches"
    )
    yield from (f"eager PyTorch: {region.path}: {region.reason}" for region in found.regions)


def _nodes(found: StepExplanation) -> tuple[int, int]:
    """The numbers of nodes of the graph as it was captured, and after the last pass."""
    return found.changes[0].before or found.changes[0].after, found.changes[-1].after


__all__ = ["forecast", "forecast_lines"]
