"""The owner of a torch optimizer: the Trainer that was last given it, as long as that is alive.

While it has an owner, the optimizer's own `step()` raises. A Trainer that serves another training
loop gives the optimizer back where that loop calls `step()` itself.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from onward.errors import OnwardError
from onward.train.torch_state import release


class OwnerMark(Protocol):
    """An object that can own an optimizer."""

    @property
    def window(self) -> frozenset[str]:
        """Names of the parameters whose gradients its open accumulation window has summed."""
        ...


STAND_IN = "_onward_stand_in"  # marks functions that take the place of an optimizer's step

_OWNERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[OwnerMark]] = (
    weakref.WeakKeyDictionary()
)


def check_free(optimizer: torch.optim.Optimizer) -> None:
    """Raises OnwardError where a live Trainer is in the middle of an accumulation window with
    it."""
    before = _owner(optimizer)
    if before is not None and before.window and _reachable_owner(optimizer) is not None:
        raise OnwardError(
            "the optimizer belongs to another onward.Trainer that is in the middle of "
            "gradient accumulation; fix: finish its accumulation first"
        )


def take(optimizer: torch.optim.Optimizer, owner: OwnerMark) -> None:
    """Makes `owner` the owner of the optimizer and replaces its `step`."""
    _OWNERS[optimizer] = weakref.ref(owner)
    optimizer.step = types.MethodType(_step, optimizer)


def give_back(optimizer: torch.optim.Optimizer, owner: OwnerMark) -> None:
    """Restores torch's `step()` where `owner` owns the optimizer; else does nothing."""
    if _owner(optimizer) is owner:
        _set_free(optimizer)


def evict(optimizer: torch.optim.Optimizer) -> None:
    """Takes the optimizer from its owner, if it has one, and restores its own `step()`. Raises
    OnwardError where a live owner is in the middle of an accumulation window."""
    check_free(optimizer)
    if optimizer in _OWNERS:
        _set_free(optimizer)


def _set_free(optimizer: torch.optim.Optimizer) -> None:
    release(optimizer)
    del _OWNERS[optimizer]
    if is_stand_in(vars(optimizer).get("step")):  # not a function that the user has put there since
        del optimizer.step


def is_stand_in(step: Any) -> bool:
    """Whether a `step` was put by Onward in the place of the optimizer's own."""
    return getattr(step, STAND_IN, False) is True


def original_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The optimizer's own `step`, with what the user or a scheduler has put around it."""
    step = optimizer.step
    if not is_stand_in(step):
        return step
    before = getattr(step, "__wrapped__", None)
    return types.MethodType(type(optimizer).step, optimizer) if before is None else before


def is_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no live Trainer owns the optimizer."""
    return _owner(optimizer) is None


def require_owner(optimizer: torch.optim.Optimizer, owner: OwnerMark) -> None:
    """Raises OnwardError where a later Trainer has taken the optimizer."""
    if _owner(optimizer) is not owner:
        raise OnwardError(
            "this Trainer's optimizer now belongs to an onward.Trainer made later; fix: "
            "train with that one, or make an optimizer for each Trainer"
        )


def _owner(optimizer: torch.optim.Optimizer) -> OwnerMark | None:
    found = _OWNERS.get(optimizer)
    return None if found is None else found()


def _reachable_owner(optimizer: torch.optim.Optimizer) -> OwnerMark | None:
    """The owner, after a garbage collection: one that only reference cycles keep alive does not
    count."""
    if _owner(optimizer) is not None:
        gc.collect()
    return _owner(optimizer)


def _step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Replaces `optimizer.step` of an owned optimizer. Raises OnwardError while the owner lives,
    whose graphs would not see the update; later calls torch's `step`."""
    if _reachable_owner(optimizer) is not None:
        raise OnwardError(
            "this optimizer belongs to an onward.Trainer, whose train_step updates the "
            "weights; fix: do not call optimizer.step()"
        )
    release(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return type(optimizer).step(optimizer, *args, **kwargs)


# schedulers set this mark on a `step` that they have wrapped; `_step` needs no wrapper, since
# `_opt_called` is set wherever an update is made
_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
setattr(_step, STAND_IN, True)
