"""Where invalid options stand: an error that names a switch names the line of a file or the
variable instead, where the option comes from there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from onward.recipes.option_sources import Given
from onward.recipes.options import InputError

_PARTS = re.compile(r"(.*), ((?:in --|on the command line).*?); fix: (.*)", re.DOTALL)
_NAME = re.compile(r"(?:--)?([A-Za-z_][\w-]*)")


def placed(error: InputError, given: Mapping[str, Given]) -> InputError:
    """The error with the places of the options that it names, by their names in `given`; the same
    error where it names none of them, or those of the command line alone."""
    parts = _PARTS.fullmatch(str(error))
    if parts is None:
        return error
    what, where, fix = parts.groups()
    by_name = {**given, **{each.spelled: each for each in given.values()}}
    named = _NAME.findall(where) if where.startswith("in ") else _NAME.findall(what)
    found = [by_name[name] for name in dict.fromkeys(named) if name in by_name]
    places = list(dict.fromkeys(each.where for each in found if each.source != "command line"))
    if not places:
        return error
    keys = " and ".join(dict.fromkeys(each.spelled for each in found))
    said = what if all(each.spelled in what for each in found) else f"{keys}: {what}"
    return InputError(said, " and ".join(places), fix.replace("did you mean --", "did you mean "))


__all__ = ["placed"]
