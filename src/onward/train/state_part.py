"""StatePart: what one owner adds to a Trainer's state_dict, and takes from it.

A list of parts is the whole: a state is the entries of all, every part checks a state before the
first one writes, and where writing fails the parts that were written go back.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onward.errors import OnwardError

State = Mapping[str, Any]


class StatePart(NamedTuple):
    """Entries of a state_dict with one owner.

    save: the entries; their tensors are the owner's own, not copies. check: raises OnwardError for
    a state that the owner cannot go on from. restore: writes a state that was checked and returns
    the way back, which puts everything as it was; where it raises it has written nothing.
    """

    save: Callable[[], dict[str, Any]]
    check: Callable[[State], None]
    restore: Callable[[State], Callable[[], None]]


def saved(parts: Iterable[StatePart]) -> dict[str, Any]:
    """The state_dict of these parts: copies, which share no memory with them."""
    return copied(live(parts))


def live(parts: Iterable[StatePart]) -> dict[str, Any]:
    """The state of these parts; its tensors are their own, not copies."""
    return {key: value for part in parts for key, value in part.save().items()}


def restore(parts: Sequence[StatePart], state: Any) -> None:
    """Writes a state into these parts, one after the other. Raises OnwardError where it does not
    fit one of them; nothing is changed then, nor where a part fails to write."""
    if not isinstance(state, Mapping):
        raise unfit(f"it is a {type(state).__name__}, not a dict")
    for part in parts:
        part.check(state)
    backs: list[Callable[[], None]] = []
    try:
        for part in parts:
            backs.append(part.restore(state))
    except BaseException:
        for back in reversed(backs):
            back()
        raise


def unfit(what: str) -> OnwardError:
    """The error of a state that cannot be loaded."""
    return OnwardError(f"the state_dict does not fit this Trainer: {what}; nothing was loaded")


def require(state: State, *keys: str) -> None:
    """Raises OnwardError where the state lacks one of these entries."""
    missing = [key for key in keys if key not in state]
    if missing:
        raise unfit(f"'{missing[0]}' is missing")


def check_count(name: str, value: Any) -> None:
    """Raises OnwardError for what is no whole number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise unfit(f"{name} is {value!r}, no count")


def check_like(name: str, given: Any, own: torch.Tensor) -> None:
    """Raises OnwardError for what is no tensor of the own one's shape, dtype and layout."""
    if not isinstance(given, torch.Tensor):
        raise unfit(f"{name} is a {type(given).__name__}, no tensor")
    if given.is_meta or given.layout != own.layout:
        raise unfit(f"{name} is on no device, or of another layout")
    if given.shape != own.shape or given.dtype != own.dtype:
        raise unfit(
            f"{name} is {given.dtype} {list(given.shape)}, but {own.dtype} {list(own.shape)} here"
        )


def copied(value: Any) -> Any:
    """A copy that shares no memory with the value. Tensors in dicts and lists are detached."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (dict, OrderedDict):
        return {k: copied(v) for k, v in value.items()}
    if type(value) is list:
        return [copied(v) for v in value]
    return copy.deepcopy(value)


__all__ = [
    "StatePart",
    "check_count",
    "check_like",
    "copied",
    "live",
    "require",
    "restore",
    "saved",
    "unfit",
]
