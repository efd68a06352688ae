"""Replaces attributes of torch and other modules temporarily, for one thread."""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# an owner (a class, a module or a dict such as globals), a name in it, and the replacement
Patch = tuple[Any, str, Any]

ABSENT = object()  # the value of a name that is not set
_BOUND_OTHERWISE = (staticmethod, classmethod)


@contextmanager
def patched(places: Iterable[Patch]) -> Iterator[None]:
    """A context in which each name has its replacement; afterwards, also after an error, it has its
    value from before, or is deleted where it was not set on the owner itself.

    A replacement that is a function acts in the thread that enters; other threads call the original
    or the inherited one. It replaces a static or class method as one of the same kind. Any other
    replacement (a property, a class, an object) acts in all threads.
    """
    given = list(places)
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, replacement in given:
            own = look(owner, name)
            visible = _for_this_thread(owner, name, own, replacement)
            before.append((owner, name, own))  # first, in case an interrupt follows
            _put(owner, name, visible)
        yield
    finally:
        _put_back(before)


def look(owner: Any, name: str) -> Any:
    """Returns the value of `name` on `owner` itself, not inherited and without calling descriptors;
    `ABSENT` where there is none."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, ABSENT)


def caller() -> types.FrameType:
    """Returns the frame that called a replacement: the first one outside of this module and of the
    module that calls this function."""
    frame = sys._getframe(1)
    here, asking = globals(), frame.f_globals
    # kept simple, as a capture runs it thousands of times
    while frame.f_globals is asking or frame.f_globals is here:
        assert frame.f_back is not None, "a replacement asks for its caller, and has one"
        frame = frame.f_back
    return frame


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(name, None) if value is ABSENT else owner.__setitem__(name, value)
    elif value is not ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def _put_back(before: list[tuple[Any, str, Any]]) -> None:
    """Restores the places in reverse order. An error at one place is raised after all others are
    restored; a place at which an interrupt arrives is restored once more."""
    failed: BaseException | None = None
    while before:
        try:
            while before:
                _put(*before[-1])
                before.pop()
        except Exception as error:
            failed = failed or error
            before.pop()
        except BaseException as interrupt:
            failed = failed or interrupt
    if failed is not None:
        raise failed


def _for_this_thread(owner: Any, name: str, own: Any, replacement: Any) -> Any:
    """Returns the replacement; a function as one that calls the original in other threads."""
    kind = type(own) if isinstance(own, _BOUND_OTHERWISE) else None
    if isinstance(replacement, _BOUND_OTHERWISE):
        kind, replacement = type(replacement), replacement.__func__
    if not isinstance(replacement, types.FunctionType):
        return replacement
    if isinstance(own, _BOUND_OTHERWISE):
        plain = own.__func__
    elif own is ABSENT and kind is classmethod:
        plain = _inherited(owner, name)
    else:
        plain = _found(owner, name, own)
    here = threading.get_ident()

    @functools.wraps(replacement)
    def by_thread(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == here else plain)(*args, **kwargs)

    return by_thread if kind is None else kind(by_thread)


def _inherited(owner: Any, name: str) -> Any:
    """Returns a function of a class that calls the class method which `owner` inherits."""

    def of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, cls), name)(*args, **kwargs)

    return of_class


def _found(owner: Any, name: str, own: Any) -> Any:
    """Returns what a read of the name finds, also inherited or builtin; where nothing, a function
    that raises AttributeError."""
    if not isinstance(owner, dict):
        found = getattr(owner, name, ABSENT)
    elif own is ABSENT and "__builtins__" in owner:  # the globals of a module
        found = getattr(builtins, name, ABSENT)
    else:
        found = own
    if found is not ABSENT:
        return found

    def nothing(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"{owner!r:.80} has no attribute {name!r}")

    return nothing


__all__ = ["ABSENT", "Patch", "caller", "look", "patched"]
