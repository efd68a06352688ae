"""Fills a table with the records that the files of a package define; each name occurs once."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def files_of(package: str, path: Iterable[str]) -> list[ModuleType]:
    """Imports the modules of a package, in the order of names: a new file is found by itself. path:
    its `__path__`."""
    names = sorted(found.name for found in pkgutil.iter_modules(path))
    return [import_module(f"{package}.{name}") for name in names]


def place_of(function: Any) -> str:
    """Module and name of a function or class, for messages about what it was registered for."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def meeting(what: str, held: Any, new: Any) -> ValueError:
    """The error of two functions or classes registered for the same thing."""
    return ValueError(
        f"{what} is registered twice, by {place_of(held)} and by {place_of(new)}; fix: remove "
        "one, or rename it"
    )


def enter(
    table: dict[str, T], kind: str, name: str, new: T, written_in: Callable[[T], Any] = lambda x: x
) -> None:
    """Puts `new` into the table; the very same again changes nothing.

    written_in: the function or class that a record stands for, by which messages name its place.
    Raises ValueError, with both places, where the name has another record.
    """
    held = table.get(name)
    if held is not None and held is not new:
        raise meeting(f"the {kind} {name}", written_in(held), written_in(new))
    table[name] = new


__all__ = ["enter", "files_of", "meeting", "place_of"]
