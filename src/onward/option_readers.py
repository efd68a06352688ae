"""The readers of options: what values each may have, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from os import PathLike, fspath
from typing import Any

from onward.errors import OnwardError, refused, shown
from onward.memory_amounts import MEMORY_BUDGET, memory_amount, whole_number

Reader = Callable[[str, Any], Any]
"""A function of an option's name and the value given for it. It returns the value converted, and
raises OnwardError where it is invalid."""


def read_count(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None or number < 1:
        raise refused(name, value, "a whole number, 1 or more")
    return number


def _count_or_none(meant: str) -> Callable[[str, object], int | None]:
    """A reader of a whole number, 1 or more, or None; meant: what a message says of both."""

    def read(name: str, value: object) -> int | None:
        number = whole_number(value)
        if value is not None and (number is None or number < 1):
            raise refused(name, value, meant)
        return number

    return read


read_limit = _count_or_none("a whole number, 1 or more, or None (all are kept)")
read_skips = _count_or_none("a whole number, 1 or more, or None (training never stops)")
read_microbatches = _count_or_none("a whole number, 1 or more, or None (as many as ranks along pp)")
read_updates = _count_or_none("a whole number of updates, 1 or more, or None")


def read_zero(name: str, value: object) -> int:
    number = whole_number(value)
    if number not in (0, 1, 2, 3):
        raise refused(name, value, "stage 1, 2 or 3 of ZeRO, or 0 (none)")
    return number


def read_spikes(name: str, value: object) -> str | None:
    if value is not None and value not in ("warn", "skip", "raise"):
        raise refused(name, value, '"warn", "skip", "raise", or None (losses are not looked at)')
    return None if value is None else str(value)


def read_offload(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or value not in ("cpu", "disk")):
        raise refused(name, value, '"cpu", "disk", or None (state is beside the weights)')
    return value


def read_folder(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | PathLike) or not (path := fspath(value)):
        raise refused(name, value, "the path of a folder, or None")
    if not isinstance(path, str):
        raise refused(name, value, "the path of a folder as text, or None")
    return path


def read_threshold(name: str, value: object) -> float:
    number = read_real(value)
    if number is None or number <= 0:
        raise refused(name, value, "a positive number")
    return number


def read_seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = read_real(value)
    if number is None or not 1 <= number <= 1e6:
        raise refused(name, value, "seconds, from 1 to 1000000, or None (those of torch)")
    return number


def read_norm(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = read_real(value)
    if number is None or number <= 0:
        raise refused(name, value, "a positive number, or None (no clipping)")
    return number


def read_decay(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = read_real(value)
    if number is None or not 0 < number < 1:
        raise refused(name, value, "a number above 0 and below 1, or None (no average)")
    return number


def read_real(value: object) -> float | None:
    """Reads a finite number, also numpy's, as float; None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)


def read_seed(name: str, value: object) -> int | None:
    if value is None:
        return None
    number = whole_number(value)
    if number is None or not 0 <= number < 2**64:
        raise refused(name, value, "a whole number from 0 to 2**64 - 1, or None")
    return number


def read_switch(name: str, value: object) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # Python's and numpy's
        raise refused(name, value, "True or False")
    return bool(value)


def read_names(name: str, value: object, commas: bool = False) -> tuple[str, ...]:
    """Reads names as a tuple without repetitions. A string is one name, or with `commas`
    several."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")] if commas else [value.strip()]
        if commas or all(parts):
            return tuple(dict.fromkeys(part for part in parts if part))
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping | bytes):
        raise refused(name, value, "a name, or a list of names")
    found = list(value)
    strange = [x for x in found if not isinstance(x, str) or not x]
    if strange:
        raise OnwardError(f"{name} holds {shown(strange[0])}; fix: give names as strings")
    return tuple(dict.fromkeys(found))


def read_budget(name: str, value: object) -> int | float | str | None:
    if value is None:
        return None
    if memory_amount(value) is None:
        raise refused(name, value, f"a value {MEMORY_BUDGET}, or None")
    return value  # type: ignore[return-value]


def read_precision(name: str, value: object) -> str:
    if value is None or value is False:
        return "no"
    if value not in PRECISIONS:
        raise refused(name, value, f"one of {', '.join(map(repr, PRECISIONS))}")
    return str(value)


PRECISIONS = ("no", "bf16", "fp16", "auto")


def read_one_of(*values: str) -> Reader:
    """A reader that accepts one of these strings."""

    def read(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in values:
            raise refused(name, value, f"one of {', '.join(map(repr, values))}")
        return value

    return read


def read_pass_names(name: str, value: object) -> tuple[str, ...]:
    return read_names(name, value, commas=True)
