"""Names of a graph's inputs and outputs, for readers: in files, dumps and messages.

What the user has named stands behind a word of ours, and `Graph.input` gives no name twice, so
that no module path, keyword or output name, whatever its characters, is one of a step's own:

    param.<path>   buffer.<path>   batch.<leaf>          inputs
    output.<name>                                        outputs of the model

The names say nothing to the stages; the graph's `Signature` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

PARAM, BUFFER, BATCH, OUTPUT = "param.", "buffer.", "batch.", "output."
_NAMED = 5  # in a message
_USER = (PARAM, BUFFER, BATCH, OUTPUT)


def parameter_name(path: str) -> str:
    """The input that is the model's parameter."""
    return PARAM + path


def output_name(name: str) -> str:
    """The output that is the model's own of this name."""
    return OUTPUT + name


def user_name(name: str) -> str:
    """What the user calls an input or output: `w` for `param.w`; other names stay."""
    return next((name[len(p) :] for p in _USER if name.startswith(p)), name)


def distinct(name: str, taken: Collection[str]) -> str:
    """The name, with a number appended where it is taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    return found


def some(names: Iterable[str]) -> str:
    """Parameters in a message: at most five by name, and how many they are."""
    found = list(names)
    more = ", ..." if len(found) > _NAMED else ""
    count = f"{len(found)} parameter{'s' if len(found) > 1 else ''}"
    return f"{', '.join(found[:_NAMED])}{more} ({count})"
