"""Learning-rate schedules by the names that transformers gives them.

transformers' own are used but for the three most usual ones, whose module brings in its Trainer:
seconds before a first update. Those are a line each, and equal to its own at every update.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from onward.errors import MissingExtraError, OnwardError


def named_schedule(name: str, optimizer: Optimizer, warmup: int, updates: int | None) -> Any:
    """The schedule of this name for so many updates, over the first of which the learning rate
    rises from 0. Raises MissingExtraError where transformers has it and is not installed."""
    own = {"constant": _constant, "constant_with_warmup": _constant, "linear": _linear}.get(name)
    if own is not None and (updates is not None or name != "linear"):
        rises = 0 if name == "constant" else warmup
        return LambdaLR(optimizer, partial(own, warmup=rises, updates=updates or 0))
    try:
        from transformers import get_scheduler
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=updates)


def goes_by_metric(scheduler: Any) -> bool:
    """Whether a schedule's `step` takes a metric, as ReduceLROnPlateau's does. Raises OnwardError
    for one that needs another argument."""
    try:
        asked = [*inspect.signature(scheduler.step).parameters.values()]
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [x.name for x in asked if x.default is x.empty and x.kind in named]
    if needed and needed not in (["metrics"], ["metric"]):
        raise OnwardError(
            f"{type(scheduler).__name__}.step needs {', '.join(needed)}, and onward.fit has no "
            "such thing; fix: a scheduler of torch, whose step() takes nothing or a metric"
        )
    return bool(needed)


def _constant(update: int, *, warmup: int, updates: int) -> float:
    return update / max(1, warmup) if update < warmup else 1.0


def _linear(update: int, *, warmup: int, updates: int) -> float:
    if update < warmup:
        return update / max(1, warmup)
    return max(0.0, (updates - update) / max(1, updates - warmup))


__all__ = ["goes_by_metric", "named_schedule"]
