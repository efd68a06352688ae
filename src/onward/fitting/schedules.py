"""Learning-rate schedules by the names that transformers gives them.

`constant`, `constant_with_warmup` and `linear` are written here, with the values that transformers'
have: importing its schedules also imports its Trainer, which takes seconds. Other names, and
`linear` without a number of updates, go to `transformers.get_scheduler`.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from onward.errors import MissingExtraError, OnwardError


def named_schedule(name: str, optimizer: Optimizer, warmup: int, updates: int | None) -> Any:
    """Makes the schedule of this name. warmup: updates over which the learning rate rises from 0.
    updates: in all. Raises MissingExtraError where transformers is needed and not installed."""
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
            f"lr_scheduler {type(scheduler).__name__}.step needs {', '.join(needed)}, which "
            "onward.fit cannot pass; fix: a scheduler whose step() takes nothing, or one metric"
        )
    return bool(needed)


def _constant(update: int, *, warmup: int, updates: int) -> float:
    return update / max(1, warmup) if update < warmup else 1.0


def _linear(update: int, *, warmup: int, updates: int) -> float:
    if update < warmup:
        return update / max(1, warmup)
    return max(0.0, (updates - update) / max(1, updates - warmup))


__all__ = ["goes_by_metric", "named_schedule"]
