"""Who owns a torch optimizer: the last Trainer that was given it, as long as that lives.

While one does, the optimizer's own `step()` raises. A Trainer that another loop leads gives it back
where that loop steps the optimizer itself.
"""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any, Protocol

import torch

from onward.errors import OnwardError
from onward.train.torch_state import release


class OwnerMark(Protocol):
    """What a Trainer leaves as its mark."""

    @property
    def window(self) -> frozenset[str]:
        """Names of the parameters whose gradients its open window has summed."""
        ...


_OWNERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[OwnerMark]] = (
    weakref.WeakKeyDictionary()
)


def check_free(optimizer: torch.optim.Optimizer) -> None:
    """Raises OnwardError where a Trainer that lives is in the middle of a window with it."""
    before = _owner(optimizer)
    if before is not None and before.window and _reachable_owner(optimizer) is not None:
        raise OnwardError(
            "the optimizer belongs to another onward.Trainer that is in the middle of "
            "gradient accumulation; fix: finish its accumulation first"
        )


def take(optimizer: torch.optim.Optimizer, owner: OwnerMark) -> None:
    """From now on the optimizer is this owner's."""
    _OWNERS[optimizer] = weakref.ref(owner)
    optimizer.step = types.MethodType(_step, optimizer)


def give_back(optimizer: torch.optim.Optimizer, owner: OwnerMark) -> None:
    """The optimizer's `step()` is torch's again, where it was this owner's."""
    if _owner(optimizer) is owner:
        del _OWNERS[optimizer]
        vars(optimizer).pop("step", None)
        release(optimizer)


def is_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no Trainer that lives owns it."""
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
    """The owner, where a Trainer that only its own cycles keep does not count."""
    if _owner(optimizer) is not None:
        gc.collect()
    return _owner(optimizer)


def _step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """In the place of `optimizer.step`: an update of the optimizer's own would be lost on the
    Trainer's graphs. Once the Trainer is gone it is torch's."""
    if _reachable_owner(optimizer) is not None:
        raise OnwardError(
            "this optimizer belongs to an onward.Trainer, whose train_step updates the "
            "weights; fix: do not call optimizer.step()"
        )
    release(optimizer)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return type(optimizer).step(optimizer, *args, **kwargs)


# what a scheduler marks the step by that it counts; ours says itself when it was taken
_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
