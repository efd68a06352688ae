"""Attributes of torch's and others', replaced while a capture runs and for its thread alone."""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# a class, a module or a mapping of names (globals, a registry); a name there; its replacement
Patch = tuple[Any, str, Any]

ABSENT = object()  # what stands where nothing does
_BOUND_OTHERWISE = (staticmethod, classmethod)


@contextmanager
def patched(places: Iterable[Patch]) -> Iterator[None]:
    """Within it, each name of each owner has its replacement; then, whatever happens, what it had
    before, or nothing where it had none of its own.

    A replacement that is a function is called by the thread that enters; other threads call what
    stood there, or was inherited. In place of a static method or a class method it becomes one. A
    replacement of another kind (a property, a class, an object) is seen by all threads.
    """
    given = list(places)
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, replacement in given:
            own = look(owner, name)
            visible = _for_this_thread(owner, name, own, replacement)
            before.append((owner, name, own))  # before it is set: an interrupt may come
            _put(owner, name, visible)
        yield
    finally:
        _put_back(before)


def look(owner: Any, name: str) -> Any:
    """What `owner` itself has under `name`, not what it inherits; else `ABSENT`. A static method
    is given as such, a descriptor too."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, ABSENT)


def caller() -> types.FrameType:
    """The frame that called what stands replaced: the first one outside of this module and of the
    module that asks."""
    frame = sys._getframe(1)
    here, asking = globals(), frame.f_globals
    while frame.f_globals is asking or frame.f_globals is here:  # thousands of times a capture
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
    """Last set, first put back. An error at one place is raised when all others are back; at an
    interrupt the place is put back once more."""
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
    """The replacement, where it is a function one that lets other threads by."""
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
    """The class method that `owner` inherits, of the class that is given."""

    def of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, cls), name)(*args, **kwargs)

    return of_class


def _found(owner: Any, name: str, own: Any) -> Any:
    """What a reader of the name finds, inherited or a builtin too."""
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
