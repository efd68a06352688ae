"""An option as a field of a dataclass: the field holds its default, its reader, its row in
docs/trainer.md and the help lines of its command-line switches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from onward.errors import OnwardError, check_names, shown
from onward.option_readers import Reader

Class = TypeVar("Class", bound=type)
Options = TypeVar("Options")


def option(
    default: Any,
    read: Reader,
    doc: str,
    example: str = "",
    switches: Mapping[str, str] | None = None,
) -> Any:
    """A dataclass field that is an option.

    read: checks and converts a given value. doc: what the option does, in one line. example: the
    value in the table of docs/trainer.md, as Python. switches: command-line switches that set it,
    each with its line in `--help`.
    """
    metadata = {"read": read, "doc": doc, "example": example, "switches": switches or {}}
    return dataclasses.field(default=default, metadata=metadata)


def documented(kind: Class) -> Class:
    """Adds a line for each field of a dataclass to its docstring, from the field's metadata."""
    lines = [f"    {f.name}: {f.metadata['doc']}" for f in dataclasses.fields(kind)]
    kind.__doc__ = f"{kind.__doc__}\n\n" + "\n".join(lines)
    return kind


def read_options(options: Any) -> None:
    """Replaces the value of each field by what its reader returns. Raises OnwardError for an
    invalid value."""
    for field in dataclasses.fields(options):
        value = field.metadata["read"](field.name, getattr(options, field.name))
        object.__setattr__(options, field.name, value)


def options_of(kind: type[Options], options: Any) -> Options:
    """Converts options given as an object of this class, a mapping, or None (the defaults). Raises
    OnwardError for anything else."""
    if options is None:
        return kind()
    if isinstance(options, kind):
        return options
    if not isinstance(options, Mapping):
        raise OnwardError(
            f"options is {shown(options)}; fix: an onward.{kind.__name__}, or a dict of its fields"
        )
    known = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    check_names("options", "option", [str(name) for name in options], known)
    return kind(**options)
