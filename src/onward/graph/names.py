"""Names of a graph's inputs and outputs, for readers of files, dumps and messages.

A user's name gets a prefix, and `Graph.input` uses no name twice, so that no module path, keyword
or output name can collide with a name of Onward's own:

    param.<path>   buffer.<path>   batch.<leaf>          inputs
    output.<name>                                        outputs of the model

Stages do not interpret names; they use the graph's `Signature`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

PARAM, BUFFER, BATCH, OUTPUT = "param.", "buffer.", "batch.", "output."
_NAMED = 5  # names listed in a message
_USER = (PARAM, BUFFER, BATCH, OUTPUT)


def parameter_name(path: str) -> str:
    """The input name of a model's parameter."""
    return PARAM + path


def buffer_name(path: str) -> str:
    """The input name of a model's buffer."""
    return BUFFER + path


def output_name(name: str) -> str:
    """The output name of a model's result."""
    return OUTPUT + name


def user_name(name: str) -> str:
    """The user's name of an input or output: `w` for `param.w`; other names are unchanged."""
    return next((name[len(p) :] for p in _USER if name.startswith(p)), name)


def distinct(name: str, taken: Collection[str]) -> str:
    """The name, with a number appended if it is taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    return found


def named_by(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern of a shell's kind names. Where one of them is the pattern itself,
    such as `w[0]`, that is the only one."""
    given = list(names)
    return [pattern] if pattern in given else [n for n in given if fnmatchcase(n, pattern)]


def some(names: Iterable[str]) -> str:
    """Parameters for a message: their number, and at most five names."""
    found = list(names)
    more = ", ..." if len(found) > _NAMED else ""
    count = f"{len(found)} parameter{'s' if len(found) > 1 else ''}"
    return f"{', '.join(found[:_NAMED])}{more} ({count})"
