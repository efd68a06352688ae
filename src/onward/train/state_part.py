"""StatePart: the entries that one owner saves in and restores from a Trainer's state_dict.

A state_dict is made of the entries of a list of parts. When one is loaded, every part checks it
before the first one writes; if a part fails to write, those already written are rolled back.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onward.errors import OnwardError, one_line

State = Mapping[str, Any]


class StatePart(NamedTuple):
    """Entries of a state_dict with one owner.

    save: returns the entries; their tensors are the owner's own, not copies. check: raises
    OnwardError for a state that cannot be restored. restore: writes a checked state and returns a
    function that undoes it; if it raises, it has written nothing. release: called once what was
    saved has been read, so that tensors on a disk leave memory.
    """

    save: Callable[[], dict[str, Any]]
    check: Callable[[State], None]
    restore: Callable[[State], Callable[[], None]]
    release: Callable[[], None] = lambda: None


def taken_part(entries: State) -> StatePart:
    """A part whose entries were taken before, and which is not restored."""
    return StatePart(lambda: dict(entries), lambda _: None, lambda _: lambda: None)


def saved(parts: Iterable[StatePart]) -> dict[str, Any]:
    """The state_dict of these parts: copies, which share no memory with them."""
    parts = list(parts)
    found = copied(live(parts))
    for part in parts:
        part.release()
    return found


def live(parts: Iterable[StatePart]) -> dict[str, Any]:
    """The state of these parts; its tensors are their own, not copies."""
    return {key: value for part in parts for key, value in part.save().items()}


def restore(parts: Sequence[StatePart], state: Any) -> None:
    """Restores a state into these parts, in order. Raises OnwardError where it does not fit one of
    them; nothing has changed then, nor after an error while writing."""
    if not isinstance(state, Mapping):
        raise unfit(f"it is a {type(state).__name__}, not a dict")
    for part in parts:
        try:
            part.check(state)
        except OnwardError:
            raise
        except Exception as error:  # any, since a value of any type may stand anywhere
            raise unfit(repr(error)) from error
    backs: list[Callable[[], None]] = []
    try:
        for part in parts:
            backs.append(part.restore(state))
    except BaseException:
        for back in reversed(backs):
            back()
        raise


def unfit(what: str) -> OnwardError:
    """The error for a state that cannot be loaded."""
    said = one_line(what, 400)
    return OnwardError(f"the state_dict does not fit this Trainer: {said}; nothing was loaded")


def require(state: State, *keys: str) -> None:
    """Raises OnwardError where the state lacks one of these entries."""
    missing = [key for key in keys if key not in state]
    if missing:
        raise unfit(f"'{missing[0]}' is missing")


def check_count(name: str, value: Any, most: int = 1 << 62) -> None:
    """Raises OnwardError for a value that is not a whole number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise unfit(f"{name} is {value!r}, not a count")


def check_like(name: str, given: Any, own: torch.Tensor) -> None:
    """Raises OnwardError for a value that is not a tensor of the shape, dtype and layout of
    `own`."""
    if not isinstance(given, torch.Tensor):
        raise unfit(f"{name} is a {type(given).__name__}, not a tensor")
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
    "taken_part",
    "unfit",
]
