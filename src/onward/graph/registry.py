"""Fills tables with records that the files of a package define; each name occurs once."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def files_of(package: str, path: Iterable[str]) -> list[ModuleType]:
    """Imports all modules of a package, sorted by name, so that new files are found automatically.
    path: the package's `__path__`."""
    names = sorted(found.name for found in pkgutil.iter_modules(path))
    return [import_module(f"{package}.{name}") for name in names]


def place_of(function: Any) -> str:
    """Module and name of a function or class, for messages about double registration."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def meeting(what: str, held: Any, new: Any) -> ValueError:
    """The error for two functions or classes registered for the same thing."""
    return ValueError(
        f"{what} is registered twice, by {place_of(held)} and by {place_of(new)}; fix: remove "
        "one, or rename it"
    )


def enter(
    table: dict[str, T], kind: str, name: str, new: T, written_in: Callable[[T], Any] = lambda x: x
) -> None:
    """Adds `new` to the table; adding the same record again does nothing.

    written_in: returns the function or class of a record, whose place messages name. Raises
    ValueError, with both places, where the name has another record.
    """
    held = table.get(name)
    if held is not None and held is not new:
        raise meeting(f"the {kind} {name}", written_in(held), written_in(new))
    table[name] = new


__all__ = ["enter", "files_of", "meeting", "place_of"]
